//! Ingests events: posts the events of many requests to the log in one transaction, and responds after it has
//! committed.

use contracts::EventId;
use http::StatusCode;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use pillarbox::database::{ConnectionGuard, is_data_error};
use pillarbox::log::{Post, PostError, post_all, post_alone};
use runtime::batch::{Batcher, Limits};
use serde::Serialize;
use service::batched_writes::{BatchedWrite, BatchedWriteHandler, Decision, WriteError, WriteResult};
use sqlx::{Postgres, Transaction};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::deliveries::message::EVENT_SOURCE;

/// By weight: a batch holds at most 5,000 events or 16 MB of payload, and the queue at most 20,000 events or 64 MB.
pub(crate) const LIMITS: Limits = Limits::new(5_000, 20_000);
/// Bytes of payload that weigh as much as one event.
const BYTES_PER_WEIGHT: usize = 16 * 1024 * 1024 / 5_000;
/// The weight of the smallest request: even a tiny one costs a response and a lookup of its idempotency key.
const REQUEST_WEIGHT_MIN: usize = 10;

/// The events of one request. They commit together or not at all.
#[derive(Debug)]
pub(crate) struct IngestRequest {
    events: Vec<Post>,
    /// Whether the response lists ids, as that of the batch endpoint does.
    is_batch: bool,
    identity: Option<RequestIdentity>,
}

/// The id under which the event was accepted.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedEvent)]
pub(crate) struct Accepted {
    /// The id of the event. Deliveries carry it as `webhook-id`.
    #[schema(value_type = String, example = "evt_0190163d-8694-739b-aea5-966c26f8ad91")]
    pub(crate) event_id: EventId,
}

/// The ids under which the events were accepted.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedEvents)]
pub(crate) struct AllAccepted {
    /// The ids of the events, in the order of the request.
    #[schema(value_type = Vec<String>)]
    pub(crate) event_ids: Vec<EventId>,
}

/// Posts the events of many requests in one transaction.
pub(crate) struct EventIngest;

pub(crate) type IngestBatcher = Batcher<BatchedWriteHandler<EventIngest>>;

impl IngestRequest {
    /// Assigns the event ids here, so that they stay the same when the batch is retried in parts.
    pub(crate) fn new(mut events: Vec<Post>, is_batch: bool, identity: Option<RequestIdentity>) -> IngestRequest {
        events.iter_mut().for_each(|event| event.id = Some(Uuid::now_v7()));
        IngestRequest { events, is_batch, identity }
    }

    fn weight(&self) -> usize {
        let bytes: usize = self.events.iter().map(|event| event.payload.get().len()).sum();
        self.events.len().max(bytes / BYTES_PER_WEIGHT).max(REQUEST_WEIGHT_MIN)
    }

    fn response(&self) -> StoredResponse {
        let mut ids = self.events.iter().filter_map(|event| event.id).map(EventId);
        if self.is_batch {
            StoredResponse::json(StatusCode::ACCEPTED, &AllAccepted { event_ids: ids.collect() })
        } else {
            let event_id = ids.next().unwrap_or(EventId(Uuid::nil()));
            StoredResponse::json(StatusCode::ACCEPTED, &Accepted { event_id })
        }
    }
}

impl BatchedWrite for EventIngest {
    type Request = IngestRequest;
    type State = ();

    fn identity(request: &IngestRequest) -> Option<&RequestIdentity> {
        request.identity.as_ref()
    }

    fn weight(request: &IngestRequest) -> usize {
        request.weight()
    }

    async fn load(&self, _: &mut Transaction<'_, Postgres>, _: &[IngestRequest]) -> Result<(), WriteError> {
        Ok(())
    }

    fn decide(&self, (): &mut (), request: &IngestRequest) -> Decision {
        Decision::Stored(Ok(request.response()))
    }

    /// Posts the events of new requests.
    async fn save(&self, tx: &mut Transaction<'_, Postgres>, (): (), new: &[&IngestRequest]) -> Result<(), WriteError> {
        let posts: Vec<&Post> = new.iter().flat_map(|request| &request.events).collect();
        if !posts.is_empty() {
            post_all(tx, &EVENT_SOURCE, posts).await.map_err(post_error)?;
        }
        Ok(())
    }

    /// Posts the events in one statement: without keys there is nothing else to commit. A caller that gets no response
    /// does not know whether its events were posted; a caller that needs to know sends a key.
    async fn write_unkeyed(
        &self,
        db: &mut ConnectionGuard<'_>,
        requests: &[IngestRequest],
    ) -> Option<Result<Vec<WriteResult>, WriteError>> {
        // Built before the commit: a panic afterwards would retry the batch in parts and post the events again.
        let responses = requests.iter().map(|request| Ok(request.response())).collect();
        let posted = post_alone(db, &EVENT_SOURCE, requests.iter().flat_map(|request| &request.events)).await;
        Some(posted.map(|_| responses).map_err(post_error))
    }

    fn committed(&self, _: &[IngestRequest], new: &[&IngestRequest]) {
        let events: usize = new.iter().map(|request| request.events.len()).sum();
        if events > 0 {
            metrics::counter!("eventhub_events_received_total").increment(events as u64);
        }
    }
}

fn post_error(error: PostError) -> WriteError {
    match error {
        PostError::Database(error) if is_data_error(&error) => {
            let detail = "PostgreSQL cannot store the payload as JSON; it may be nested too deeply";
            WriteError::Request(Problem::bad_request("unfit-event", detail))
        }
        PostError::Database(error) => error.into(),
        invalid @ (PostError::Topic
        | PostError::Key
        | PostError::Aggregate
        | PostError::TooLarge(_)
        | PostError::TooDeep) => WriteError::Request(Problem::bad_request("unfit-event", invalid.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn a_request_weighs_by_its_events_and_its_bytes() {
        let event = |bytes: usize| {
            let payload = RawValue::from_string(format!("\"{}\"", "x".repeat(bytes - 2)));
            Post::new("t", payload.unwrap())
        };
        let weight = |events: usize, bytes: usize| {
            IngestRequest::new((0..events).map(|_| event(bytes)).collect(), events > 1, None).weight()
        };
        assert_eq!(LIMITS.batch_max / weight(1, 100), 500, "a batch holds 500 small requests");
        assert_eq!(weight(1_000, 100), 1_000);
        assert_eq!(LIMITS.batch_max / weight(4, 250_000), 16, "a batch holds 16 requests of a megabyte");
        assert_eq!(LIMITS.queue_max / weight(4, 250_000), 67);
    }
}
