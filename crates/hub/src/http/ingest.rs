//! Where events come in.

use std::sync::Arc;

use axum::extract::State;
use kit::auth::{Caller, Role, Tenant};
use kit::idempotency::{Answer, JsonBody, Mutation};
use kit::problem::{FieldError, Problem};
use kit::trace::TraceContext;
use mailbox::post::{Post, PostError};
use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Hub;
use crate::ingest::{Accepted, AllAccepted, Taking};

const BATCH_MAX: usize = 1_000;

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new().routes(routes!(take)).routes(routes!(take_as_the_seed_has_it)).routes(routes!(take_all))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewHubEvent)]
struct NewEvent {
    /// Letters, digits and `_` in parts joined by dots; none that a service posts (`hub.export`).
    #[schema(max_length = 200, example = "order.paid")]
    event_type: String,
    /// Any JSON, at most 256 KB. It is delivered byte for byte.
    #[schema(value_type = Value)]
    payload: Box<RawValue>,
    /// Events of one key reach each subscriber in order; without one they wait for no other.
    #[schema(max_length = 255, example = "order-17")]
    ordering_key: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewHubEvents)]
struct NewEvents {
    /// They are taken together or not at all.
    #[schema(min_items = 1, max_items = 1000)]
    events: Vec<NewEvent>,
}

/// Post an event
///
/// The answer comes when the event is on disk. Repeat a request with the same `Idempotency-Key` if no answer came.
#[utoipa::path(post, path = "/hub/v1/events", tag = "hub", request_body = NewEvent,
    params(("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn take(
    State(hub): State<Arc<Hub>>,
    caller: Caller,
    request: Mutation<JsonBody<NewEvent>>,
) -> Result<Answer, Problem> {
    caller.require(Role::Ingest)?;
    let Mutation { body: JsonBody(event), identity } = request;
    let post = event.post(&hub, &caller, "")?;
    submit(&hub, Taking::new(vec![post], false, identity)).await
}

/// Post an event, under its short address
#[utoipa::path(post, path = "/events", tag = "hub", request_body = NewEvent,
    params(("x-idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn take_as_the_seed_has_it(
    hub: State<Arc<Hub>>,
    caller: Caller,
    request: Mutation<JsonBody<NewEvent>>,
) -> Result<Answer, Problem> {
    take(hub, caller, request).await
}

/// Post up to 1,000 events together
#[utoipa::path(post, path = "/hub/v1/events/batch", tag = "hub", request_body = NewEvents,
    params(("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])), responses((status = 202, body = AllAccepted)))]
async fn take_all(
    State(hub): State<Arc<Hub>>,
    caller: Caller,
    request: Mutation<JsonBody<NewEvents>>,
) -> Result<Answer, Problem> {
    caller.require(Role::Ingest)?;
    let Mutation { body: JsonBody(NewEvents { events }), identity } = request;
    if events.is_empty() || events.len() > BATCH_MAX {
        let detail = format!("takes 1 to {BATCH_MAX} events");
        return Err(Problem::validation(vec![FieldError::body("/events", detail)]));
    }
    let posts = events.into_iter().enumerate().map(|(at, event)| event.post(&hub, &caller, &format!("/events/{at}")));
    let posts = posts.collect::<Result<Vec<Post>, Problem>>()?;
    submit(&hub, Taking::new(posts, true, identity)).await
}

async fn submit(hub: &Hub, taking: Taking) -> Result<Answer, Problem> {
    match hub.ingest.submit(taking).await {
        Ok(answered) => answered,
        Err(refused) => Err(refused.into_problem(Problem::clone)),
    }
}

impl NewEvent {
    fn post(self, hub: &Hub, caller: &Caller, pointer: &str) -> Result<Post, Problem> {
        let mut post = Post::new(self.event_type, self.payload);
        post.key = self.ordering_key;
        post.tenant = caller.tenant.clone();
        post.trace = TraceContext::current();
        let field = |name: &str, detail: String| {
            Problem::validation(vec![FieldError::body(format!("{pointer}/{name}"), detail)])
        };
        post.check().map_err(|error| match error {
            PostError::Topic => {
                field("event_type", "takes up to 200 letters, digits and _, in parts joined by dots".to_owned())
            }
            PostError::Key => field("ordering_key", "takes 1 to 255 characters, without NUL".to_owned()),
            PostError::TooLarge(_) => field("payload", error.to_string()),
            PostError::Aggregate | PostError::Database(_) => Problem::internal(&error),
        })?;
        // Or who receives it would take it for the service's.
        if hub.export.covers(&post.topic) && post.tenant.as_str() == Tenant::MAIN {
            let detail = "is a type that only services post here (`hub.export`): choose another";
            return Err(field("event_type", detail.to_owned()));
        }
        Ok(post)
    }
}
