//! Bans, the history of an event, and the audit trail.

use std::sync::Arc;

use axum::extract::State;
use http_kit::auth::{Operator, Principal};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Organizer;
use crate::Joins;
use crate::flow::queries;
use crate::store::moderation::AuditFilter;
use crate::view::{BanView, HistoryEntryView};

pub(super) fn router() -> OpenApiRouter<Arc<Joins>> {
    OpenApiRouter::new().routes(routes!(bans)).routes(routes!(history)).routes(routes!(audit))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditFilters {
    /// Only moderation of this event.
    event_id: Option<Uuid>,
    /// Only moderation by this user or API key: `user:<id>` or `key:<id>`.
    #[param(value_type = Option<String>, pattern = "^(user|key):[0-9a-fA-F-]{36}$")]
    actor: Option<Principal>,
}

/// List the bans of an event that are in force, newest first
#[utoipa::path(get, path = "/join/v1/events/{id}/bans", operation_id = "listBans", tag = "joins",
    params(("id" = Uuid, Path, description = "Event id"), Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<BanView>), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist")))]
async fn bans(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<BanView>, Problem> {
    let scope = PageScope::of_owner(&joins.cursor_key, "joins bans", organizer.event.id, &filters);
    let before = scope.position(cursor.as_deref())?;
    let bans = queries::bans(&joins, organizer.event.id, before, limit + 1).await?;
    Ok(scope.cut(bans, limit, |ban| (ban.created_at, ban.id)).map(BanView::from))
}

/// List every change of the registrations and bans of an event, oldest first
#[utoipa::path(get, path = "/join/v1/events/{id}/history", operation_id = "listRegistrationHistory", tag = "joins",
    params(("id" = Uuid, Path, description = "Event id"), Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<HistoryEntryView>), (status = 403, description = "The caller is not the event's organizer"),
        (status = 404, description = "The event does not exist")))]
async fn history(
    State(joins): State<Arc<Joins>>,
    organizer: Organizer,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<HistoryEntryView>, Problem> {
    let scope = PageScope::of_owner(&joins.cursor_key, "joins history", organizer.event.id, &filters);
    let after = scope.position(cursor.as_deref())?;
    let entries = queries::history(&joins, organizer.event.id, after, limit + 1).await?;
    Ok(scope.cut(entries, limit, |entry| entry.version).map(HistoryEntryView::from))
}

/// List the kicks, bans and lifted bans of all events, newest first
///
/// The audit trail, for admins of the tenant `main`. The history of an event contains its other changes.
#[utoipa::path(get, path = "/join/v1/audit", operation_id = "listRegistrationAuditTrail", tag = "joins", params(Listing<AuditFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<HistoryEntryView>)))]
async fn audit(
    State(joins): State<Arc<Joins>>,
    Operator(_): Operator,
    Listing { filters, limit, cursor }: Listing<AuditFilters>,
) -> Result<Page<HistoryEntryView>, Problem> {
    let scope = PageScope::global(&joins.cursor_key, "joins audit", &filters);
    let before = scope.position(cursor.as_deref())?;
    let filter = AuditFilter { event_id: filters.event_id, by: filters.actor };
    let entries = queries::audit(&joins, &filter, before, limit + 1).await?;
    let page = scope.cut(entries, limit, |entry| (entry.at, entry.event_id, entry.version));
    Ok(page.map(HistoryEntryView::from))
}
