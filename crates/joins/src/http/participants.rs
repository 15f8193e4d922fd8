//! Lists and counts for the event's organizer.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, ETAG};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use http_kit::etag::{self, IfNoneMatch};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Organizer;
use crate::Joins;
use crate::flow::queries;
use crate::view::{RegistrationView, StatsView};

pub(super) fn router() -> OpenApiRouter<Arc<Joins>> {
    OpenApiRouter::new().routes(routes!(participants)).routes(routes!(waitlist)).routes(routes!(stats))
}

/// List the active registrations, in the order of joining
#[utoipa::path(get, path = "/join/v1/events/{id}/participants", operation_id = "listParticipants", tag = "joins",
    params(("id" = Uuid, Path, description = "Event id"), Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<RegistrationView>), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist")))]
async fn participants(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<RegistrationView>, Problem> {
    let scope = PageScope::of_owner(&joins.cursor_key, "joins active", organizer.event.id, &filters);
    let after = scope.position(cursor.as_deref())?;
    let registrations = queries::participants(&joins, organizer.event.id, after, limit + 1).await?;
    let page = scope.cut(registrations, limit, |registration| registration.seq);
    Ok(page.map(|registration| RegistrationView::new(registration, None)))
}

/// List the waitlist, in the order of joining
///
/// Each registration has its position, up to 10,001.
#[utoipa::path(get, path = "/join/v1/events/{id}/waitlist", operation_id = "listWaitlist", tag = "joins",
    params(("id" = Uuid, Path, description = "Event id"), Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<RegistrationView>), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist")))]
async fn waitlist(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<RegistrationView>, Problem> {
    let scope = PageScope::of_owner(&joins.cursor_key, "joins waitlisted", organizer.event.id, &filters);
    let after = scope.position(cursor.as_deref())?;
    let registrations = queries::waitlist(&joins, organizer.event.id, after, limit + 1).await?;
    let page = scope.cut(registrations, limit, |entry| entry.registration.seq);
    Ok(page.map(|entry| RegistrationView::new(entry.registration, entry.ahead.map(|ahead| ahead + 1))))
}

/// Show the capacity and the counts of an event
#[utoipa::path(get, path = "/join/v1/events/{id}/stats", operation_id = "getRegistrationStats", tag = "joins",
    params(("id" = Uuid, Path, description = "Event id"),
        ("if-none-match" = Option<String>, Header, description = "The ETag of the response that the client has cached")),
    security(("bearer" = [])),
    responses((status = 200, body = StatsView, headers(("etag" = String, description = "Changes when the event or its counts change"))),
        (status = 304, description = "The cached response is current"), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist")))]
async fn stats(organizer: Organizer, if_none_match: IfNoneMatch) -> Response {
    // The tag is made of the content: after a failover, the versions of lost changes are assigned again.
    let body = StatsView::from(&organizer.event).to_json();
    let tag = etag::of_content(&body);
    if if_none_match.matches(&tag) {
        (StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response()
    } else {
        ([(ETAG, tag), (CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
    }
}
