//! Events: listing them, and their outcome for each subscriber.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use kit::extract::{Json, Path};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Manager, page_scope, type_prefix};
use crate::Hub;
use crate::flow::event as flow;
use crate::flow::event::EventFilter;
use crate::view::{EventIdParam, EventWithOutcomes, ListedEvent};

pub(super) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventFilters {
    /// This type and all types below it, such as `order`.
    event_type: Option<String>,
    /// Received at this time or later.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Received before this time.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
}

/// List events, newest first
///
/// Each page searches a bounded part of the log. A page can therefore be short or empty and still have a `next_cursor`.
#[utoipa::path(get, path = "/hub/v1/events", tag = "hub", params(Listing<EventFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<ListedEvent>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<EventFilters>,
) -> Result<Page<ListedEvent>, Problem> {
    let scope = page_scope(&hub, "events", &caller, &filters);
    let before = scope.position(cursor.as_deref())?;
    let filter = EventFilter { event_type: type_prefix(filters.event_type), from: filters.from, to: filters.to };
    let (items, before) = flow::list(&hub, &caller.tenant, filter, (before, limit)).await?;
    Ok(Page { items, next_cursor: before.map(|before| scope.cursor(&before)) })
}

/// Show an event and its outcome for each subscriber
#[utoipa::path(get, path = "/hub/v1/events/{id}", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", description = "`evt_` and a UUID, or the UUID alone")),
    responses((status = 200, body = EventWithOutcomes),
        (status = 404, description = "There is no such event, or its retention has expired")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(EventIdParam(id)): Path<EventIdParam>,
) -> Result<Json<EventWithOutcomes>, Problem> {
    Ok(Json(flow::show(&hub, &caller.tenant, id).await?))
}
