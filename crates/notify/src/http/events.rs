//! Business events, for producers.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use contracts::EventId;
use contracts::notify::PAYLOAD_BYTES_MAX;
use http_kit::field::Parsed;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::BusinessEvent;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{IDEMPOTENCY_KEY, Producer};
use crate::Notify;
use crate::domain::business_event;
use crate::flow::produce;

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(post_event))
}

/// A business event.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewBusinessEvent, example = json!({"event_id": "evt-123-456", "event_type": "RESERVATION_REQUESTED",
    "aggregate_type": "RESTAURANT", "aggregate_id": 5, "payload": {"guests": 4}}))]
struct NewEvent {
    /// The id that you know the event by. A repeated id is one event.
    #[serde(default)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255, pattern = "^[!-~]+$")]
    event_id: Parsed<Option<String>>,
    /// The type: letters, digits and `_` in parts joined by dots.
    #[schema(value_type = String, required = true, pattern = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length = 187)]
    event_type: Option<Parsed<String>>,
    /// One of `GET /notify/v1/aggregate-types`.
    #[schema(value_type = String, required = true)]
    aggregate_type: Option<Parsed<String>>,
    #[schema(value_type = i64, required = true)]
    aggregate_id: Option<Parsed<i64>>,
    /// Any JSON of at most 261,632 bytes.
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Value, required = true)]
    payload: Option<Box<RawValue>>,
    /// Events with the same key are processed in order. By default, those of one aggregate are.
    #[serde(default)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    key: Parsed<Option<String>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedBusinessEvent)]
struct Accepted {
    /// The id of the event on every channel.
    #[schema(value_type = String, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: EventId,
}

/// Post a business event
///
/// For API keys of the tenant `main` with the role `ingest`. Everyone behind the aggregate is notified, over the channels that
/// they want. In SQL, in your own transaction: `select pillarbox.notify(...)`.
#[utoipa::path(post, path = "/notify/v1/events", operation_id = "postBusinessEvent", tag = "notify", request_body = NewEvent,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, body = Accepted),
        (status = 409, description = "The event_id was posted before with other content")))]
async fn post_event(
    State(notify): State<Arc<Notify>>,
    _: Producer,
    Mutation { body: JsonBody(event), identity }: Mutation<JsonBody<NewEvent>>,
) -> Result<StoredResponse, Problem> {
    let event = match event.checked() {
        Ok(event) => event,
        Err(InvalidEvent { mut errors, aggregate_type }) => {
            errors.extend(produce::unknown_type(&notify.db, aggregate_type).await?);
            return Err(Problem::validation(errors));
        }
    };
    let _turn = match &event.event_id {
        Some(event_id) => produce::wait_for_turn(&notify.event_gates, event_id).await?,
        None => None,
    };
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let event_id = EventId(produce::post(tx, &event).await?);
            Ok(StoredResponse::json(StatusCode::ACCEPTED, &Accepted { event_id }))
        })
    })
    .await
}

/// An event with invalid fields. Whether the aggregate type is known is not checked yet.
struct InvalidEvent {
    errors: Vec<FieldError>,
    aggregate_type: Option<String>,
}

/// A payload may be null, which is not the same as none.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(deserializer).map(Some)
}

impl NewEvent {
    /// Fails with all invalid fields.
    fn checked(self) -> Result<BusinessEvent, InvalidEvent> {
        let mut errors = Vec::new();
        let event_id = self.event_id.collect("/event_id", &mut errors);
        let event_type = Parsed::collect_required(self.event_type, "/event_type", &mut errors);
        let aggregate_type = Parsed::collect_required(self.aggregate_type, "/aggregate_type", &mut errors);
        let aggregate_id = Parsed::collect_required(self.aggregate_id, "/aggregate_id", &mut errors);
        let key = self.key.collect("/key", &mut errors);
        let texts = (
            event_type.as_deref(),
            event_id.as_ref().and_then(Option::as_deref),
            key.as_ref().and_then(Option::as_deref),
        );
        errors.extend(business_event::check(texts.0.unwrap_or("valid"), texts.1, texts.2));
        match &self.payload {
            None => errors.push(FieldError::body("/payload", "is required")),
            Some(payload) if payload.get().len() > PAYLOAD_BYTES_MAX => {
                let detail = format!(
                    "has {} bytes; at most {PAYLOAD_BYTES_MAX} are accepted: store larger content elsewhere and post a reference",
                    payload.get().len()
                );
                errors.push(FieldError::body("/payload", detail));
            }
            Some(_) => {}
        }
        let complete = match (event_type, aggregate_type.clone(), aggregate_id, self.payload) {
            (Some(event_type), Some(aggregate_type), Some(aggregate_id), Some(payload)) if errors.is_empty() => {
                let (event_id, key) = (event_id.flatten(), key.flatten());
                Some(BusinessEvent { event_id, event_type, aggregate_type, aggregate_id, payload, key })
            }
            _ => None,
        };
        complete.ok_or(InvalidEvent { errors, aggregate_type })
    }
}
