//! What a person does for themselves.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use kit::auth::{Principal, User};
use kit::extract::{Json, Path};
use kit::idempotency::{Answer, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::order;
use crate::Joins;
use crate::domain::Command;
use crate::flow::look;
use crate::view::{PositionView, RegistrationView};

pub(super) fn router() -> OpenApiRouter<Arc<Joins>> {
    OpenApiRouter::new()
        .routes(routes!(join))
        .routes(routes!(cancel))
        .routes(routes!(my))
        .routes(routes!(position))
        .routes(routes!(my_joins))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MyFilters {
    /// Only these: `active`, `waitlisted`, `canceled`, `expired` or `rejected`.
    #[param(value_type = Option<String>, example = "active")]
    status: Option<JoinStatus>,
}

/// Join an event, or its waitlist when it is full
///
/// Who is in already gets their registration again, with 200. Who left, or was taken out without a ban, may join again and
/// stands behind all others then.
#[utoipa::path(post, path = "/join/v1/events/{id}/join", tag = "joins",
    params(("id" = Uuid, Path, description = "The event"),
        ("idempotency-key" = String, Header, description = "A new value for each new request; repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 201, body = RegistrationView, description = "`active`, or `waitlisted` with the position"),
        (status = 200, body = RegistrationView, description = "They were in already; `position` is another question"),
        (status = 403, description = "Banned from this event (`banned`), or not a user"),
        (status = 404, description = "There is no such event"),
        (status = 409, description = "Not published, canceled or ended (`event-not-published`, `event-canceled`, `event-ended`)"),
        (status = 422, description = "The key was used for another request")))]
async fn join(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
    request: Mutation<()>,
) -> Result<Answer, Problem> {
    order(&joins, id, Principal::User(user), &request, Command::Join { user }).await
}

/// Give up one's seat, or one's place in the waitlist; the first who waits gets the seat
#[utoipa::path(post, path = "/join/v1/events/{id}/cancel", tag = "joins",
    params(("id" = Uuid, Path, description = "The event"),
        ("idempotency-key" = String, Header, description = "A new value for each new request; repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 200, body = RegistrationView),
        (status = 404, description = "There is no such event, or they are not in it (`not-registered`)"),
        (status = 422, description = "The key was used for another request")))]
async fn cancel(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
    request: Mutation<()>,
) -> Result<Answer, Problem> {
    order(&joins, id, Principal::User(user), &request, Command::Cancel { user }).await
}

/// Show one's registration
#[utoipa::path(get, path = "/join/v1/events/{id}/my", tag = "joins", params(("id" = Uuid, Path, description = "The event")),
    security(("bearer" = [])),
    responses((status = 200, body = RegistrationView), (status = 404, description = "There is no such event, or they never joined it")))]
async fn my(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
) -> Result<Json<RegistrationView>, Problem> {
    let (entry, ahead) = look::place(&joins, id, user).await?;
    Ok(Json(RegistrationView::new(entry, ahead.map(|ahead| ahead + 1))))
}

/// Show one's place in the waitlist
#[utoipa::path(get, path = "/join/v1/events/{id}/position", tag = "joins", params(("id" = Uuid, Path, description = "The event")),
    security(("bearer" = [])),
    responses((status = 200, body = PositionView), (status = 404, description = "There is no such event, or they never joined it")))]
async fn position(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
) -> Result<Json<PositionView>, Problem> {
    let (entry, ahead) = look::place(&joins, id, user).await?;
    Ok(Json(PositionView::new(entry.status, ahead)))
}

/// List one's registrations, newest first
#[utoipa::path(get, path = "/join/v1/me/joins", tag = "joins", params(Listing<MyFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<RegistrationView>)))]
async fn my_joins(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Listing { filters, limit, cursor }: Listing<MyFilters>,
) -> Result<Page<RegistrationView>, Problem> {
    let scope = format!("joins of {user}?{filters:?}");
    let before: Option<(DateTime<Utc>, Uuid)> =
        cursor.map(|cursor| joins.cursor_key.open(&scope, &cursor)).transpose()?;
    let entries = look::registrations(&joins, user, filters.status, (before, limit + 1)).await?;
    let page = Page::cut(entries, limit, &joins.cursor_key, &scope, |entry| (entry.created_at, entry.id));
    Ok(page.map(|entry| RegistrationView::new(entry, None)))
}
