//! The HTTP API, under `/event/v1`. Requests that change something require a [`kit::auth::User`] and support
//! `Idempotency-Key` and `If-Match`; published events are readable without authentication.

mod events;
mod feed;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use http::header::{ETAG, LOCATION};
use http::{HeaderValue, StatusCode};
use kit::idempotency::StoredResponse;
use kit::openapi::{self, RouteProblem};
use kit::problem::Problem;
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::Events;
use crate::coalesced_reads::ShownVersion;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";

/// The problems of the service's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("* /event/v1/events/{id}*", 404, "event-not-found", "this event does not exist"),
    ("PATCH /event/v1/events/{id}", 409, "transition-refused", "an event that is canceled cannot be changed"),
    ("POST /event/v1/events/{id}/*", 409, "transition-refused", "an event that is canceled cannot be published"),
    ("GET /event/v1/events", 410, "cursor-expired", "the list that this cursor belongs to has expired"),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Events>> {
    let mut router = OpenApiRouter::new().merge(feed::router()).merge(events::router());
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// Adds `ETag` and, for a new event, `Location`. Both are derived from the body, so the stored response of a repeated
/// request gets them too.
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
