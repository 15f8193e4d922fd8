//! The endpoints to which producers post events.

use std::num::NonZeroU32;
use std::sync::Arc;

use axum::extract::State;
use http_kit::admission::caller_id::Subject;
use http_kit::auth::Caller;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::Tenant;
use pillarbox::log::{Post, PostError};
use runtime::trace::TraceContext;
use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Hub;
use crate::access::Producer;
use crate::directory::domain::is_reserved;
use crate::events::ingest::{Accepted, AllAccepted, IngestRequest};

/// Events per batch request.
const BATCH_MAX: usize = 1_000;

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new().routes(routes!(post_event)).routes(routes!(post_event_short)).routes(routes!(post_batch))
}

/// An event to post.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewHubEvent, example = json!({"event_type": "order.paid", "payload": {"id": 17}, "ordering_key": "order-17"}))]
struct NewEvent {
    /// The type: letters, digits and `_` in parts joined by dots. In the tenant `main`, the types that services publish
    /// (`hub.export`) are reserved, and in all tenants those that begin with `hub.`.
    #[schema(pattern = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length = 200, example = "order.paid")]
    event_type: String,
    /// Any JSON of at most 256 KB. It is delivered byte for byte.
    #[schema(value_type = Value)]
    payload: Box<RawValue>,
    /// Events with the same key reach each subscriber in the order in which they were posted. An event without a key
    /// waits for no other.
    #[schema(min_length = 1, max_length = 255, example = "order-17")]
    ordering_key: Option<String>,
}

/// Events to post together.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewHubEvents, example = json!({"events": [{"event_type": "order.paid", "payload": {"id": 17}}]}))]
struct NewEvents {
    /// All of them are accepted, or none.
    #[schema(min_items = 1, max_items = 1000)]
    events: Vec<NewEvent>,
}

/// Post an event
///
/// The response is sent after the event is stored durably. If no response arrives, repeat the request with the same
/// `Idempotency-Key`.
#[utoipa::path(post, path = "/hub/v1/events", operation_id = "postEvent", tag = "hub", request_body = NewEvent,
    params(("idempotency-key" = Option<String>, Header,
        description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn post_event(
    State(hub): State<Arc<Hub>>,
    Producer(caller): Producer,
    Mutation { body: JsonBody(event), identity }: Mutation<JsonBody<NewEvent>>,
) -> Result<StoredResponse, Problem> {
    let post = event.into_post(&hub, &caller, "")?;
    submit(&hub, &caller, vec![post], false, identity).await
}

/// Post an event (short path)
///
/// The same as `POST /hub/v1/events`.
#[utoipa::path(post, path = "/events", operation_id = "postEventAtRoot", tag = "hub", request_body = NewEvent,
    params(("x-idempotency-key" = Option<String>, Header,
        description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn post_event_short(
    hub: State<Arc<Hub>>,
    producer: Producer,
    request: Mutation<JsonBody<NewEvent>>,
) -> Result<StoredResponse, Problem> {
    post_event(hub, producer, request).await
}

/// Post up to 1,000 events together
///
/// All of them are accepted, or none.
#[utoipa::path(post, path = "/hub/v1/events/batch", operation_id = "postEvents", tag = "hub", request_body = NewEvents,
    params(("idempotency-key" = Option<String>, Header,
        description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])), responses((status = 202, body = AllAccepted)))]
async fn post_batch(
    State(hub): State<Arc<Hub>>,
    Producer(caller): Producer,
    Mutation { body: JsonBody(NewEvents { events }), identity }: Mutation<JsonBody<NewEvents>>,
) -> Result<StoredResponse, Problem> {
    if events.is_empty() || events.len() > BATCH_MAX {
        let detail = format!("must be a list of 1 to {BATCH_MAX} events");
        return Err(Problem::validation(vec![FieldError::body("/events", detail)]));
    }
    let posts = events
        .into_iter()
        .enumerate()
        .map(|(index, event)| event.into_post(&hub, &caller, &format!("/events/{index}")));
    let posts = posts.collect::<Result<Vec<Post>, Problem>>()?;
    submit(&hub, &caller, posts, true, identity).await
}

/// Waits until the events of the request are committed. Refuses them if too many messages of the tenant wait, if it posts
/// more events per second than the operator allows, or if one of them does not match the catalogue of event types.
async fn submit(
    hub: &Hub,
    caller: &Caller,
    posts: Vec<Post>,
    is_batch: bool,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    hub.limits.waiting.check(&caller.tenant)?;
    if let Some(rate) = caller.standing.events_per_second_max.and_then(NonZeroU32::new) {
        let count = u32::try_from(posts.len()).unwrap_or(u32::MAX);
        hub.limits.rates.check(Subject::Tenant(caller.tenant.as_str()), rate, count)?;
    }
    let posts = hub.catalogue.check(&caller.tenant, posts, is_batch).await?;
    match hub.ingest.submit(IngestRequest::new(posts, is_batch, identity)).await {
        Ok(response) => response,
        Err(error) => Err(Problem::of_batch(error, Problem::clone)),
    }
}

impl NewEvent {
    /// Fails with the invalid field. `pointer` is where the event is in the request body.
    fn into_post(self, hub: &Hub, caller: &Caller, pointer: &str) -> Result<Post, Problem> {
        let mut post = Post::new(self.event_type, self.payload);
        post.key = self.ordering_key;
        post.tenant = caller.tenant.clone();
        post.trace = TraceContext::current();
        let field = |name: &str, detail: String| {
            Problem::validation(vec![FieldError::body(format!("{pointer}/{name}"), detail)])
        };
        post.check().map_err(|error| match error {
            PostError::Topic => {
                field("event_type", "must be up to 200 letters, digits and _, in parts joined by dots".to_owned())
            }
            PostError::Key => field("ordering_key", "must have 1 to 255 characters, without NUL".to_owned()),
            PostError::TooLarge(_) | PostError::TooDeep => field("payload", error.to_string()),
            PostError::Aggregate | PostError::Database(_) => Problem::internal(&error),
        })?;
        if let Some(max) = caller.standing.payload_bytes_max
            && post.payload.get().len() > max as usize
        {
            let (bytes, tenant) = (post.payload.get().len(), post.tenant.as_str());
            let detail = format!("has {bytes} bytes; the tenant `{tenant}` may post at most {max}");
            return Err(field("payload", detail));
        }
        if is_reserved(&post.topic) {
            let detail = "is reserved: types that begin with `hub.` are posted by the hub itself";
            return Err(field("event_type", detail.to_owned()));
        }
        // Otherwise a subscriber could not distinguish a forged event from the service's own.
        if hub.export.covers(&post.topic) && post.tenant.as_str() == Tenant::MAIN {
            let detail = "is reserved for services (`hub.export`): choose another type";
            return Err(field("event_type", detail.to_owned()));
        }
        Ok(post)
    }
}
