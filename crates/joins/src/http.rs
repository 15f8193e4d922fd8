//! The HTTP API, under `/join/v1`.

mod audit;
mod moderation;
mod participants;
mod registration;

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use http_kit::auth::{Caller, Principal};
use http_kit::extract::Path;
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::openapi::{self, RouteProblem};
use http_kit::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::Joins;
use crate::command_batcher::CommandRequest;
use crate::domain::{Actor, CommandKind, Event};
use crate::flow::command_batch::new_command;
use crate::flow::queries;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str =
    "A unique value per request. A repeated request with the same key has no further effect and gets the same response";

/// The problems of the service's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("* /join/v1/events/{id}/*", 404, "event-not-found", "there is no such event"),
    ("* /join/v1/events/{id}/my", 404, "not-registered", "you have never joined this event"),
    ("* /join/v1/events/{id}/position", 404, "not-registered", "you have never joined this event"),
    ("POST /join/v1/events/{id}/cancel", 404, "not-registered", "you have not joined this event"),
    ("POST /join/v1/events/{id}/kick", 404, "not-registered", "this user has not joined the event"),
    ("POST /join/v1/events/{id}/unban", 404, "not-banned", "this user is not banned"),
    ("POST /join/v1/events/{id}/join", 403, "banned", "you are banned from this event"),
    ("POST /join/v1/events/{id}/join", 409, "event-not-published", "this event is not published"),
    ("POST /join/v1/events/{id}/join", 409, "event-canceled", "this event is canceled"),
    ("POST /join/v1/events/{id}/join", 409, "event-ended", "this event has ended"),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Joins>> {
    let routers = [registration::router(), participants::router(), moderation::router(), audit::router()];
    let mut router = routers.into_iter().fold(OpenApiRouter::new(), OpenApiRouter::merge);
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// The organizer of the event in the path: its owner, or an operator. As an extractor it runs before the rest of the
/// request is parsed, and a handler that requires it cannot omit the check.
struct Organizer {
    event: Event,
    principal: Principal,
}

impl FromRequestParts<Arc<Joins>> for Organizer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, joins: &Arc<Joins>) -> Result<Organizer, Problem> {
        let caller = <Caller as FromRequestParts<Arc<Joins>>>::from_request_parts(parts, joins).await?;
        let Path(id) = Path::<Uuid>::from_request_parts(parts, joins).await?;
        let event = queries::find_event(joins, id).await?;
        if caller.user_id() == Some(event.owner_id) || caller.is_operator() {
            return Ok(Organizer { event, principal: caller.principal });
        }
        Err(queries::not_organizer_error(joins, &event, caller.user_id()).await?.into())
    }
}

/// Runs a command once for each `Idempotency-Key`. Fails if the request has no key.
async fn submit<T>(
    joins: &Joins,
    event_id: Uuid,
    principal: Principal,
    request: &Mutation<T>,
    kind: CommandKind,
) -> Result<StoredResponse, Problem> {
    let identity = request.require_identity()?.clone();
    let command = new_command(event_id, Actor::Caller(principal), kind);
    joins.command_batchers.submit(CommandRequest { command, identity }).await
}
