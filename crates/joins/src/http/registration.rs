//! The caller's own registrations.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use http_kit::auth::{Principal, User};
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, submit};
use crate::Joins;
use crate::domain::CommandKind;
use crate::flow::queries;
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
    /// Only registrations with this status: `active`, `waitlisted`, `canceled`, `expired` or `rejected`.
    #[param(value_type = Option<String>, pattern = "^(active|waitlisted|canceled|expired|rejected)$")]
    status: Option<JoinStatus>,
}

/// Join an event, or its waitlist if it is full
///
/// Returns 200 with the existing registration if the user has already joined. A user who canceled or was removed
/// without a ban may join again, and is then last in the order of joining.
#[utoipa::path(post, path = "/join/v1/events/{id}/join", operation_id = "joinGathering", tag = "joins",
    params(("id" = Uuid, Path, description = "Event id"),
        ("idempotency-key" = String, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 201, body = RegistrationView, description = "The registration: `active`, or `waitlisted` with its position"),
        (status = 200, body = RegistrationView, description = "The user had already joined; `position` is omitted"),
        (status = 403, description = "The user is banned from this event (`banned`); `detail` contains the end of the ban and its reason. Or the caller is not a user"),
        (status = 404, description = "The event does not exist, or was published this moment: try again after `Retry-After`",
            headers(("retry-after" = u32, description = "Seconds to wait before the next attempt"))),
        (status = 409, description = "The event is not published, is canceled or has ended (`event-not-published`, `event-canceled`, `event-ended`)"),
        (status = 422, description = "The key was used for a different request")))]
async fn join(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
    request: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    submit(&joins, id, Principal::User(user), &request, CommandKind::Join { user }).await
}

/// Cancel your registration
///
/// The first registration of the waitlist gets a freed seat.
#[utoipa::path(post, path = "/join/v1/events/{id}/cancel", operation_id = "leaveGathering", tag = "joins",
    params(("id" = Uuid, Path, description = "Event id"),
        ("idempotency-key" = String, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = RegistrationView),
        (status = 404, description = "The event does not exist, or the user is not registered (`not-registered`)"),
        (status = 422, description = "The key was used for a different request")))]
async fn cancel(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
    request: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    submit(&joins, id, Principal::User(user), &request, CommandKind::Cancel { user }).await
}

/// Show your registration
#[utoipa::path(get, path = "/join/v1/events/{id}/my", operation_id = "getMyRegistration", tag = "joins", params(("id" = Uuid, Path, description = "Event id")),
    security(("bearer" = [])),
    responses((status = 200, body = RegistrationView), (status = 404, description = "The event does not exist, or the user has never joined it")))]
async fn my(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
) -> Result<Json<RegistrationView>, Problem> {
    Ok(Json(queries::find_registration(&joins, id, user).await?.into()))
}

/// Show your position in the waitlist
#[utoipa::path(get, path = "/join/v1/events/{id}/position", operation_id = "getMyWaitlistPosition", tag = "joins", params(("id" = Uuid, Path, description = "Event id")),
    security(("bearer" = [])),
    responses((status = 200, body = PositionView), (status = 404, description = "The event does not exist, or the user has never joined it")))]
async fn position(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Path(id): Path<Uuid>,
) -> Result<Json<PositionView>, Problem> {
    let own = queries::find_registration(&joins, id, user).await?;
    Ok(Json(PositionView::new(own.registration.status, own.ahead)))
}

/// List your registrations, newest first
#[utoipa::path(get, path = "/join/v1/me/joins", operation_id = "listMyRegistrations", tag = "joins", params(Listing<MyFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<RegistrationView>)))]
async fn my_joins(
    State(joins): State<Arc<Joins>>,
    User(user): User,
    Listing { filters, limit, cursor }: Listing<MyFilters>,
) -> Result<Page<RegistrationView>, Problem> {
    let scope = PageScope::of_owner(&joins.cursor_key, "joins mine", user, &filters);
    let before: Option<(DateTime<Utc>, Uuid)> = scope.position(cursor.as_deref())?;
    let registrations = queries::list_of_user(&joins, user, filters.status, before, limit + 1).await?;
    let page = scope.cut(registrations, limit, |own| (own.registration.created_at, own.registration.id));
    Ok(page.map(RegistrationView::from))
}
