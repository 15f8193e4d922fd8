//! Moderation by the event's organizer.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, SubsecRound, Utc};
use http_kit::field::printable;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::{FieldError, Problem};
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, Organizer, submit};
use crate::Joins;
use crate::domain::CommandKind;
use crate::view::{BanView, RegistrationView};

const REASON_CHARS_MAX: usize = 500;

pub(super) fn router() -> OpenApiRouter<Arc<Joins>> {
    OpenApiRouter::new().routes(routes!(kick)).routes(routes!(ban)).routes(routes!(unban))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = KickRequest, example = json!({"user_id": "0190a000-0000-7000-8000-000000000002", "reason": "The seat is reserved for a speaker."}))]
struct Kick {
    user_id: Uuid,
    /// The user is notified of the reason.
    #[schema(format = "line", max_length = 500)]
    reason: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = BanRequest, example = json!({"user_id": "0190a000-0000-7000-8000-000000000002", "reason": "Spam"}))]
struct BanUser {
    user_id: Uuid,
    /// The user is notified of the reason.
    #[schema(format = "line", max_length = 500)]
    reason: Option<String>,
    /// Omit it for a permanent ban.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = UnbanRequest, example = json!({"user_id": "0190a000-0000-7000-8000-000000000002"}))]
struct Unban {
    user_id: Uuid,
}

/// Remove a user from the event or its waitlist
///
/// The user may join again.
#[utoipa::path(post, path = "/join/v1/events/{id}/kick", operation_id = "kickUser", tag = "joins", request_body = Kick,
    params(("id" = Uuid, Path, description = "Event id"),
        ("idempotency-key" = String, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = RegistrationView), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist, or the user is not registered (`not-registered`)")))]
async fn kick(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    request: Mutation<JsonBody<Kick>>,
) -> Result<StoredResponse, Problem> {
    let JsonBody(Kick { user_id, reason }) = &request.body;
    check_reason(reason.as_deref())?;
    let kind = CommandKind::Kick { user: *user_id, reason: reason.clone() };
    submit(&joins, organizer.event.id, organizer.principal, &request, kind).await
}

/// Ban a user from the event, permanently or until a given time
///
/// A current registration of the user ends. If the user is already banned, the new reason and time replace the old
/// ones.
#[utoipa::path(post, path = "/join/v1/events/{id}/ban", operation_id = "banUser", tag = "joins", request_body = BanUser,
    params(("id" = Uuid, Path, description = "Event id"),
        ("idempotency-key" = String, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = BanView), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist")))]
async fn ban(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    request: Mutation<JsonBody<BanUser>>,
) -> Result<StoredResponse, Problem> {
    let JsonBody(BanUser { user_id, reason, expires_at }) = &request.body;
    check_reason(reason.as_deref())?;
    // PostgreSQL stores microseconds.
    let expires_at = expires_at.map(|end| end.trunc_subsecs(6));
    let kind = CommandKind::Ban { user: *user_id, reason: reason.clone(), expires_at };
    submit(&joins, organizer.event.id, organizer.principal, &request, kind).await
}

/// Lift a ban
#[utoipa::path(post, path = "/join/v1/events/{id}/unban", operation_id = "unbanUser", tag = "joins", request_body = Unban,
    params(("id" = Uuid, Path, description = "Event id"),
        ("idempotency-key" = String, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The user may join again"), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist, or the user is not banned (`not-banned`)")))]
async fn unban(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    request: Mutation<JsonBody<Unban>>,
) -> Result<StoredResponse, Problem> {
    let kind = CommandKind::Unban { user: request.body.0.user_id };
    submit(&joins, organizer.event.id, organizer.principal, &request, kind).await
}

fn check_reason(reason: Option<&str>) -> Result<(), Problem> {
    let checked = reason.map_or(Ok(()), |reason| printable(reason, REASON_CHARS_MAX));
    checked.map_err(|detail| Problem::validation(vec![FieldError::body("/reason", detail)]))
}
