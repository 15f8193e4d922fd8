//! Announcements for operators, under `/admin/v1/announcements`.

use std::sync::Arc;

use axum::extract::State;
use http_kit::auth::Operator;
use http_kit::extract::Path;
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use super::retry::{self, Retried};
use crate::Notify;
use crate::flow::announcements;
use crate::view::announcements::AnnouncementView;

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(retry_one))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AnnouncementFilters {
    /// Only announcements that were given up, or only those that were not.
    given_up: Option<bool>,
}

/// List announcements, newest first
///
/// Business events whose many recipients are being notified in steps. Those that are complete are not listed.
#[utoipa::path(get, path = "/admin/v1/announcements", operation_id = "listAnnouncements", tag = "notify",
    params(Listing<AnnouncementFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<AnnouncementView>)))]
async fn list(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<AnnouncementFilters>,
) -> Result<Page<AnnouncementView>, Problem> {
    let scope = PageScope::global(&notify.cursor_key, "announcements", &filters);
    let before = scope.position(cursor.as_deref())?;
    let found = announcements::list(&notify.db, filters.given_up, before, limit + 1).await?;
    Ok(scope.cut(found, limit, |record| record.id).map(AnnouncementView::from))
}

/// Continue an announcement that was given up
///
/// It continues after the last user who was notified; no user is notified twice.
#[utoipa::path(post, path = "/admin/v1/announcements/{id}/retry", operation_id = "retryAnnouncement", tag = "notify",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, description = "The announcement is due now"),
        (status = 404, description = "The announcement does not exist (any more)"),
        (status = 409, description = "The announcement was not given up")))]
async fn retry_one(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    retry::retry(&notify, Retried::Announcement(id), identity).await
}
