//! Events: listing them, and their outcome for each subscriber.

pub(crate) mod ingest;
pub(crate) mod messages;

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http::StatusCode;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::page::{Listing, Page};
use http_kit::problem::Problem;
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, find_response};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Hub;
use crate::access::{Manager, page_scope, type_prefix};
use crate::error::Error;
use crate::events::flow;
use crate::events::flow::rejected::CheckedEvents;
use crate::events::store::EventFilter;
use crate::events::view::message::EventIdParam;
use crate::events::view::{EventWithOutcomes, ListedEvent, RetriedEvents};

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show)).routes(routes!(retry)).routes(routes!(retry_many))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventFilters {
    /// This type and all types below it, such as `order`.
    event_type: Option<String>,
    /// Received at this time or later.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Received before this time.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Only events with this status.
    #[param(inline)]
    status: Option<ListedStatus>,
}

/// The statuses by which events can be listed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = HubListedEventStatus)]
enum ListedStatus {
    /// Posted in SQL, and refused by the catalogue of event types or by a limit of the tenant.
    Rejected,
}

/// Which rejected events to retry.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"event_type": "order.paid"}))]
struct RetryEvents {
    /// This type and all types below it.
    event_type: String,
    /// The `next_after` of the response to the previous request.
    after: Option<i64>,
}

/// List events, newest first
///
/// Each page searches a bounded part of the log. A page can therefore be short or empty and still have a `next_cursor`.
#[utoipa::path(get, path = "/hub/v1/events", operation_id = "listEvents", tag = "hub", params(Listing<EventFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<ListedEvent>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<EventFilters>,
) -> Result<Page<ListedEvent>, Problem> {
    let scope = page_scope(&hub, "events", &caller, &filters);
    let before = scope.position(cursor.as_deref())?;
    let filter = EventFilter { event_type: type_prefix(filters.event_type), from: filters.from, to: filters.to };
    let (items, before) = match filters.status {
        Some(ListedStatus::Rejected) => flow::rejected::list(&hub, &caller.tenant, &filter, before, limit).await?,
        None => flow::list(&hub, &caller.tenant, filter, before, limit).await?,
    };
    Ok(Page { items, next_cursor: before.map(|before| scope.cursor(&before)) })
}

/// Show an event and its outcome for each subscriber
#[utoipa::path(get, path = "/hub/v1/events/{id}", operation_id = "getEvent", tag = "hub", security(("bearer" = [])),
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

/// Send a rejected event after all
///
/// The event is checked against the catalogue as it is now. If it is accepted, it is sent as if it was posted now: behind the
/// events that wait in its lane.
#[utoipa::path(post, path = "/hub/v1/events/{id}/retry", operation_id = "retryRejectedEvent", tag = "hub", security(("bearer" = [])),
    params(("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect"),
        ("id" = String, Path, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", description = "`evt_` and a UUID, or the UUID alone")),
    responses((status = 202, description = "The event is accepted and will be sent")))]
async fn retry(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(EventIdParam(id)): Path<EventIdParam>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    if let Some(repeated) = find_response(&hub.db, identity.as_ref()).await? {
        return Ok(repeated);
    }
    let event = flow::rejected::check(&hub, &caller.tenant, id).await?;
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            if flow::rejected::accept(tx, &caller.tenant, &[event], hub.clock.now()).await? == 0 {
                return Err(Error::NotRejected.into());
            }
            Ok(StoredResponse::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}

/// Send the rejected events of a type after all
///
/// Those that the catalogue, as it is now, accepts are sent as if they were posted now, oldest first. A request retries at most
/// 100 events, or what it can check within a second: repeat it with `after` while the response says `more`.
#[utoipa::path(post, path = "/hub/v1/events/retry", operation_id = "retryRejectedEvents", tag = "hub", security(("bearer" = [])), request_body = RetryEvents,
    params(("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    responses((status = 200, body = RetriedEvents)))]
async fn retry_many(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<RetryEvents>>,
) -> Result<StoredResponse, Problem> {
    let event_type = type_prefix(Some(body.event_type)).unwrap_or_default();
    if let Some(repeated) = find_response(&hub.db, identity.as_ref()).await? {
        return Ok(repeated);
    }
    let checked = flow::rejected::check_many(&hub, &caller.tenant, &event_type, body.after).await?;
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let CheckedEvents { acceptable, refused, more, next_after } = checked;
            let retried = flow::rejected::accept(tx, &caller.tenant, &acceptable, hub.clock.now()).await?;
            Ok(StoredResponse::json(StatusCode::OK, &RetriedEvents { retried, refused, more, next_after }))
        })
    })
    .await
}
