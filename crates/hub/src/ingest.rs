//! Ingests events: posts the events of many requests to the log in one transaction, and responds after it has
//! committed.

use contracts::EventId;
use http::StatusCode;
use kit::batch::{BatchError, BatchHandler, Limits};
use kit::clock::Clock;
use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::Problem;
use mailbox::database::{ConnectionGuard, DatabaseTransaction, DedicatedConnection, is_data_error, problem};
use mailbox::idempotency::{Claim, claim_all};
use mailbox::log::{Post, PostError, post_all, post_alone};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::hub_message::EVENT_SOURCE;

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
pub(crate) struct Accepted {
    /// The id of the event. Deliveries carry it as `webhook-id`.
    #[schema(value_type = String, example = "evt_0190163d-8694-739b-aea5-966c26f8ad91")]
    pub(crate) event_id: EventId,
}

/// The ids under which the events were accepted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AllAccepted {
    /// The ids of the events, in the order of the request.
    #[schema(value_type = Vec<String>)]
    pub(crate) event_ids: Vec<EventId>,
}

/// Posts the events of a batch of requests, over a dedicated connection.
pub(crate) struct IngestBatchHandler {
    pub(crate) db: DedicatedConnection,
    pub(crate) clock: Clock,
}

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
        match self.is_batch {
            true => StoredResponse::json(StatusCode::ACCEPTED, &AllAccepted { event_ids: ids.collect() }),
            false => {
                let event_id = ids.next().unwrap_or(EventId(Uuid::nil()));
                StoredResponse::json(StatusCode::ACCEPTED, &Accepted { event_id })
            }
        }
    }
}

impl BatchHandler for IngestBatchHandler {
    type Item = IngestRequest;
    type Output = Result<StoredResponse, Problem>;
    type Error = Problem;

    async fn run(&self, requests: &[IngestRequest]) -> Result<Vec<Self::Output>, BatchError<Problem>> {
        let unavailable = |error: sqlx::Error| BatchError::Whole(problem(&error));
        let mut db = self.db.acquire().await.map_err(unavailable)?;
        let ingested = match requests.iter().any(|request| request.identity.is_some()) {
            true => self.ingest_keyed(db.begin().await.map_err(unavailable)?, requests).await,
            false => ingest_unkeyed(&mut db, requests).await,
        };
        db.release(&ingested).await;
        let Ingested { responses, events } = ingested.map_err(|IngestError(failure)| failure)?;
        if events > 0 {
            metrics::counter!("eventhub_events_received_total").increment(events);
        }
        Ok(responses)
    }

    fn weight(request: &IngestRequest) -> usize {
        request.weight()
    }
}

/// The result of one batch.
struct Ingested {
    /// One per request, in their order.
    responses: Vec<Result<StoredResponse, Problem>>,
    /// The number of events posted.
    events: u64,
}

/// Why a batch failed: because of one of its requests, or as a whole.
struct IngestError(BatchError<Problem>);

impl From<sqlx::Error> for IngestError {
    fn from(error: sqlx::Error) -> IngestError {
        IngestError(BatchError::Whole(problem(&error)))
    }
}

impl From<PostError> for IngestError {
    fn from(error: PostError) -> IngestError {
        match error {
            PostError::Database(error) if is_data_error(&error) => {
                let detail = "PostgreSQL cannot store the payload as JSON; it may be nested too deeply";
                IngestError(BatchError::Item(Problem::bad_request("unfit-event", detail)))
            }
            PostError::Database(error) => error.into(),
            invalid @ (PostError::Topic | PostError::Key | PostError::Aggregate | PostError::TooLarge(_)) => {
                IngestError(BatchError::Item(Problem::bad_request("unfit-event", invalid.to_string())))
            }
        }
    }
}

/// Posts the events in one statement, which is its own transaction: without idempotency keys there is nothing else to
/// commit. A caller that gets no response does not know whether its events were posted; a caller that needs to know
/// sends a key.
async fn ingest_unkeyed(db: &mut ConnectionGuard<'_>, requests: &[IngestRequest]) -> Result<Ingested, IngestError> {
    // Built before the commit: a panic afterwards would retry the batch in parts and post the events again.
    let responses = requests.iter().map(|request| Ok(request.response())).collect();
    let posted = post_alone(db, &EVENT_SOURCE, requests.iter().flat_map(|request| &request.events)).await?;
    Ok(Ingested { responses, events: posted.len() as u64 })
}

impl IngestBatchHandler {
    /// Posts the events of new requests, and returns the stored response for repeated ones.
    async fn ingest_keyed(
        &self,
        mut tx: DatabaseTransaction<'_>,
        requests: &[IngestRequest],
    ) -> Result<Ingested, IngestError> {
        let keyed: Vec<(RequestIdentity, StoredResponse)> =
            requests.iter().filter_map(|request| Some((request.identity.clone()?, request.response()))).collect();
        let claims = claim_all(&mut tx, &keyed, self.clock.now()).await;
        let mut claims = claims.map_err(|error| IngestError(BatchError::Whole(error)))?.into_iter();
        let (mut posts, mut responses) = (Vec::new(), Vec::with_capacity(requests.len()));
        for request in requests {
            let claim = match request.identity {
                Some(_) => claims.next().unwrap_or(Claim::First),
                None => Claim::First,
            };
            responses.push(match claim {
                Claim::First => {
                    posts.extend(&request.events);
                    Ok(request.response())
                }
                Claim::Repeat(response) => Ok(response),
                Claim::Rejected(refused) => Err(refused),
            });
        }
        if !posts.is_empty() {
            post_all(&mut tx, &EVENT_SOURCE, posts.iter().copied()).await?;
        }
        tx.commit().await?;
        Ok(Ingested { responses, events: posts.len() as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::value::RawValue;

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
