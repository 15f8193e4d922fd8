//! The HTTP API, under `/event/v1`. Requests that change something require a [`http_kit::auth::User`], or the owner of the event
//! or an admin, and support `Idempotency-Key` and `If-Match`; published events are readable without authentication.

mod events;
mod feed;

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use chrono::{DateTime, Utc};
use http::header::{ETAG, LOCATION};
use http::{HeaderValue, StatusCode};
use http_kit::auth::Caller;
use http_kit::extract::Path;
use http_kit::idempotency::StoredResponse;
use http_kit::openapi::{self, RouteProblem};
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::Events;
use crate::coalesced_reads::ShownVersion;
use crate::domain::{Action, Actor};
use crate::flow;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";

/// The problems of the service's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("* /event/v1/events/{id}*", 404, "event-not-found", "this event does not exist"),
    ("PATCH /event/v1/events/{id}", 409, "transition-refused", "an event that is canceled cannot be changed"),
    ("POST /event/v1/events/{id}/*", 409, "transition-refused", "an event that is canceled cannot be published"),
    ("POST /event/v1/events/{id}/handover/accept", 404, "not-offered", "this event was not offered to you"),
    ("POST /event/v1/events/{id}/publish", 409, "event-ended", "this event has ended"),
    ("GET /event/v1/events", 422, "search-too-broad", "the search takes longer than 1s: use rarer words"),
    ("GET /event/v1/events", 410, "cursor-expired", "the list that this cursor belongs to has expired"),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Events>> {
    let mut router = OpenApiRouter::new().merge(feed::router()).merge(events::router());
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// The owner of the event in the path, or an admin: they may withdraw it. As an extractor it runs before the rest of the
/// request is read, and a handler that requires it cannot omit the check.
struct OwnerOrAdmin {
    actor: Actor,
    id: Uuid,
}

impl FromRequestParts<Arc<Events>> for OwnerOrAdmin {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, events: &Arc<Events>) -> Result<OwnerOrAdmin, Problem> {
        let caller = <Caller as FromRequestParts<Arc<Events>>>::from_request_parts(parts, events).await?;
        let Path(id) = Path::<Uuid>::from_request_parts(parts, events).await?;
        let actor = Actor::from(&caller);
        // Unpublishing and canceling have the same permissions.
        flow::event::check(events, actor, id, Action::Cancel).await?;
        Ok(OwnerOrAdmin { actor, id })
    }
}

/// Adds `ETag` and, for a new event, `Location`. Both are derived from the body, so the stored response of a repeated
/// request also gets them.
fn with_headers(response: StoredResponse) -> Result<StoredResponse, Problem> {
    #[derive(Deserialize)]
    struct Body {
        id: Uuid,
        version: i64,
        updated_at: DateTime<Utc>,
        active_participants: i32,
    }
    if !response.status().is_success() {
        return Ok(response);
    }
    let body: Body = serde_json::from_slice(response.body()).map_err(|error| Problem::internal(&error))?;
    let is_new = response.status() == StatusCode::CREATED;
    let Body { id, version, updated_at, active_participants } = body;
    let response = response.with_header(ETAG, ShownVersion { version, updated_at, active_participants }.etag());
    if !is_new {
        return Ok(response);
    }
    let location = HeaderValue::try_from(format!("/event/v1/events/{id}"));
    Ok(response.with_header(LOCATION, location.map_err(|error| Problem::internal(&error))?))
}
