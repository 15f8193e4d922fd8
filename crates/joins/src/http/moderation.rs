//! What an organizer does.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, SubsecRound, Utc};
use kit::field::printable;
use kit::idempotency::{Answer, JsonBody, Mutation};
use kit::problem::{FieldError, Problem};
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{Organizer, order};
use crate::Joins;
use crate::domain::Command;
use crate::view::{BanView, RegistrationView};

const REASON_CHARS_MAX: usize = 500;

pub(super) fn router() -> OpenApiRouter<Arc<Joins>> {
    OpenApiRouter::new().routes(routes!(kick)).routes(routes!(ban)).routes(routes!(unban))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Kick {
    user_id: Uuid,
    /// They are told.
    #[schema(max_length = 500)]
    reason: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct BanUser {
    user_id: Uuid,
    /// They are told.
    #[schema(max_length = 500)]
    reason: Option<String>,
    /// Absent: for ever.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Unban {
    user_id: Uuid,
}

/// Take someone out, from a seat or from the waitlist; they may join again
#[utoipa::path(post, path = "/join/v1/events/{id}/kick", tag = "joins", request_body = Kick,
    params(("id" = Uuid, Path, description = "The event"),
        ("idempotency-key" = String, Header, description = "A new value for each new request; repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = RegistrationView), (status = 403, description = "For the event's organizer"),
        (status = 404, description = "There is no such event, or they are not in it (`not-registered`)")))]
async fn kick(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    request: Mutation<JsonBody<Kick>>,
) -> Result<Answer, Problem> {
    let JsonBody(Kick { user_id, reason }) = &request.body;
    check_reason(reason.as_deref())?;
    let command = Command::Kick { user: *user_id, reason: reason.clone() };
    order(&joins, organizer.event.id, organizer.principal, &request, command).await
}

/// Keep someone out, for ever or until then; who is in is taken out
///
/// Who is banned already is banned as said now.
#[utoipa::path(post, path = "/join/v1/events/{id}/ban", tag = "joins", request_body = BanUser,
    params(("id" = Uuid, Path, description = "The event"),
        ("idempotency-key" = String, Header, description = "A new value for each new request; repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = BanView), (status = 403, description = "For the event's organizer"),
        (status = 404, description = "There is no such event")))]
async fn ban(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    request: Mutation<JsonBody<BanUser>>,
) -> Result<Answer, Problem> {
    let JsonBody(BanUser { user_id, reason, expires_at }) = &request.body;
    check_reason(reason.as_deref())?;
    // As PostgreSQL keeps it.
    let expires_at = expires_at.map(|end| end.trunc_subsecs(6));
    let command = Command::Ban { user: *user_id, reason: reason.clone(), expires_at };
    order(&joins, organizer.event.id, organizer.principal, &request, command).await
}

/// Let someone who is banned join again
#[utoipa::path(post, path = "/join/v1/events/{id}/unban", tag = "joins", request_body = Unban,
    params(("id" = Uuid, Path, description = "The event"),
        ("idempotency-key" = String, Header, description = "A new value for each new request; repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 204, description = "They may join"), (status = 403, description = "For the event's organizer"),
        (status = 404, description = "There is no such event, or they are not banned from it (`not-banned`)")))]
async fn unban(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    request: Mutation<JsonBody<Unban>>,
) -> Result<Answer, Problem> {
    let command = Command::Unban { user: request.body.0.user_id };
    order(&joins, organizer.event.id, organizer.principal, &request, command).await
}

fn check_reason(reason: Option<&str>) -> Result<(), Problem> {
    let checked = reason.map_or(Ok(()), |reason| printable(reason, REASON_CHARS_MAX));
    checked.map_err(|detail| Problem::validation(vec![FieldError::body("/reason", detail)]))
}
