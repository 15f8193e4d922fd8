//! What an organizer sees.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::ETAG;
use axum::response::{IntoResponse, Response};
use contracts::joins::JoinStatus;
use kit::etag::{self, IfNoneMatch};
use kit::extract::Json;
use kit::page::{Listing, NoFilters, Page};
use kit::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Organizer;
use crate::Joins;
use crate::flow::look;
use crate::view::{RegistrationView, StatsView};

pub(super) fn router() -> OpenApiRouter<Arc<Joins>> {
    OpenApiRouter::new().routes(routes!(participants)).routes(routes!(waitlist)).routes(routes!(stats))
}

/// List who takes part, in the order in which they joined
#[utoipa::path(get, path = "/join/v1/events/{id}/participants", tag = "joins",
    params(("id" = Uuid, Path, description = "The event"), Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<RegistrationView>), (status = 403, description = "For the event's organizer"),
        (status = 404, description = "There is no such event")))]
async fn participants(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    listing: Listing<NoFilters>,
) -> Result<Page<RegistrationView>, Problem> {
    people(&joins, organizer.event.id, JoinStatus::Active, listing).await
}

/// List who waits, the first first
#[utoipa::path(get, path = "/join/v1/events/{id}/waitlist", tag = "joins",
    params(("id" = Uuid, Path, description = "The event"), Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<RegistrationView>), (status = 403, description = "For the event's organizer"),
        (status = 404, description = "There is no such event")))]
async fn waitlist(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    listing: Listing<NoFilters>,
) -> Result<Page<RegistrationView>, Problem> {
    people(&joins, organizer.event.id, JoinStatus::Waitlisted, listing).await
}

/// Show capacity and counts
#[utoipa::path(get, path = "/join/v1/events/{id}/stats", tag = "joins",
    params(("id" = Uuid, Path, description = "The event"),
        ("if-none-match" = Option<String>, Header, description = "The ETag of the copy that you have")),
    security(("bearer" = [])),
    responses((status = 200, body = StatsView, headers(("etag" = String, description = "Version of event and counts"))),
        (status = 304, description = "You have it as it is"), (status = 403, description = "For the event's organizer"),
        (status = 404, description = "There is no such event")))]
async fn stats(organizer: Organizer, if_none_match: IfNoneMatch) -> Response {
    let event = organizer.event;
    // Neither ever shrinks, so their sum is one number that changes with either.
    let version = event.counts.version + event.event_version;
    let tag = [(ETAG, etag::of(version))];
    match if_none_match.has(version) {
        true => (StatusCode::NOT_MODIFIED, tag).into_response(),
        false => (tag, Json(StatsView::from(&event))).into_response(),
    }
}

async fn people(
    joins: &Joins,
    event_id: Uuid,
    status: JoinStatus,
    Listing { limit, cursor, .. }: Listing<NoFilters>,
) -> Result<Page<RegistrationView>, Problem> {
    let scope = format!("joins {status:?} of {event_id}");
    let after = cursor.map(|cursor| joins.cursor_key.open(&scope, &cursor)).transpose()?;
    let entries = look::people(joins, event_id, status, (after, limit + 1)).await?;
    let page = Page::cut(entries, limit, &joins.cursor_key, &scope, |entry| entry.seq);
    Ok(page.map(|entry| RegistrationView::new(entry, None)))
}
