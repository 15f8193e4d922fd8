//! Replays: jobs that send events again.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http::StatusCode;
use http_kit::auth::Caller;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, Page};
use http_kit::problem::Problem;
use serde::Deserialize;
use service::idempotency::StoreResponse;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::Hub;
use crate::access::{Manager, page_scope};
use crate::error::Error;
use crate::events::view::message::MessageId;
use crate::replays::domain::{ReplayAction, ReplayState};
use crate::replays::fields::ReplayFields;
use crate::replays::flow;
use crate::replays::flow::ReplayFilter;
use crate::replays::replay::{Replay, ReplayOutcomes};
use crate::replays::view::{ReplayCount, ReplayView};

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(cancel))
        .routes(routes!(resend))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReplayFilters {
    /// Only replays for this subscriber alone.
    subscriber_id: Option<Uuid>,
    #[param(inline)]
    state: Option<ReplayState>,
}

/// List replays, newest first
#[utoipa::path(get, path = "/hub/v1/replays", operation_id = "listReplays", tag = "hub", params(Listing<ReplayFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<ReplayView>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<ReplayFilters>,
) -> Result<Page<ReplayView>, Problem> {
    let scope = page_scope(&hub, "replays", &caller, &filters);
    let before = scope.position(cursor.as_deref())?;
    let filter = ReplayFilter { subscriber: filters.subscriber_id, state: filters.state };
    let replays = flow::list(&hub, &caller.tenant, filter, before, limit + 1).await?;
    let now = hub.clock.now();
    let names = flow::subscriber_names(&hub, &replays).await?;
    Ok(scope.cut(replays, limit, |(replay, _)| replay.id).map(|found| ReplayView::new(found, now).named(&names)))
}

/// Send events again
///
/// Creates a job that sends events again, in the order in which they were posted, in separate lanes: it neither waits for
/// live messages nor delays them. Its messages carry the header `webhook-replay` with the id of the job; `webhook-id` is that
/// of the event. With `dry_run` nothing is created, and the response is the number of messages.
#[utoipa::path(post, path = "/hub/v1/replays", operation_id = "createReplay", tag = "hub", request_body = ReplayFields,
    params(("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 202, body = ReplayView, description = "The job is created"),
        (status = 200, body = ReplayCount, description = "The result of a dry run"),
        (status = 404, description = "The subscriber or an event does not exist"),
        (status = 409, description = "The tenant has too many active replays")))]
async fn create(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Mutation { body: JsonBody(fields), identity }: Mutation<JsonBody<ReplayFields>>,
) -> Result<StoredResponse, Problem> {
    let is_dry_run = fields.dry_run;
    let request = fields.check()?;
    if is_dry_run {
        let mut tx = hub.db.begin().await.map_err(Error::from)?;
        let count = flow::dry_run(&mut tx, &hub.events, &caller.tenant, request, hub.clock.now()).await?;
        return Ok(StoredResponse::json(StatusCode::OK, &count));
    }
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let now = hub.clock.now();
            Ok(accepted(flow::create(tx, &caller.tenant, request, caller.principal, now).await?, now))
        })
    })
    .await
}

/// Show a replay and its progress
#[utoipa::path(get, path = "/hub/v1/replays/{id}", operation_id = "getReplay", tag = "hub", params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 200, body = ReplayView), (status = 404, description = "There is no such replay")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
) -> Result<Json<ReplayView>, Problem> {
    let found = flow::show(&hub, &caller.tenant, id).await?;
    let names = flow::subscriber_names(&hub, std::slice::from_ref(&found)).await?;
    Ok(Json(ReplayView::new(found, hub.clock.now()).named(&names)))
}

/// Pause a replay
///
/// No message is created once the response has arrived; those that exist are sent. While a backfill is paused, its
/// subscriber gets no live events either: they follow when it is resumed.
#[utoipa::path(post, path = "/hub/v1/replays/{id}/pause", operation_id = "pauseReplay", tag = "hub",
    params(("id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 200, body = ReplayView), (status = 404, description = "There is no such replay"),
        (status = 409, description = "The replay has ended")))]
async fn pause(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&hub, caller, id, ReplayAction::Pause, identity).await
}

/// Resume a paused replay
#[utoipa::path(post, path = "/hub/v1/replays/{id}/resume", operation_id = "resumeReplay", tag = "hub",
    params(("id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 200, body = ReplayView), (status = 404, description = "There is no such replay"),
        (status = 409, description = "The replay has ended")))]
async fn resume(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&hub, caller, id, ReplayAction::Resume, identity).await
}

/// Cancel a replay
///
/// No message is created once the response has arrived; those that exist are sent. The subscriber of a canceled backfill
/// gets the events that are posted from now on.
#[utoipa::path(post, path = "/hub/v1/replays/{id}/cancel", operation_id = "cancelReplay", tag = "hub",
    params(("id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 200, body = ReplayView), (status = 404, description = "There is no such replay"),
        (status = 409, description = "The replay has ended")))]
async fn cancel(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&hub, caller, id, ReplayAction::Cancel, identity).await
}

/// Send a message again
///
/// Creates a replay of this message, also if it is delivered. Nothing is sent if its event no longer matches the types and
/// the filter of the subscriber. When it was sent, an open dead letter of the message is closed, unless it blocks its lane: retry
/// the dead letter instead.
#[utoipa::path(post, path = "/hub/v1/messages/{id}/resend", operation_id = "resendMessage", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\.[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", description = "The UUIDs of the event and the subscriber, joined by a dot"),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    responses((status = 202, body = ReplayView, description = "The job is created"),
        (status = 404, description = "There is no such message, or its retention has expired"),
        (status = 409, description = "The tenant has too many active replays")))]
async fn resend(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<MessageId>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let now = hub.clock.now();
            Ok(accepted(flow::resend(tx, &caller.tenant, id, caller.principal, now).await?, now))
        })
    })
    .await
}

fn accepted(replay: Replay, now: DateTime<Utc>) -> StoredResponse {
    StoredResponse::json(StatusCode::ACCEPTED, &ReplayView::new((replay, ReplayOutcomes::default()), now))
}

async fn change(
    hub: &Arc<Hub>,
    caller: Caller,
    id: Uuid,
    action: ReplayAction,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            let now = hub.clock.now();
            let changed = flow::change(tx, &caller.tenant, id, action, now).await?;
            tracing::info!(replay = %id, ?action, by = %caller.principal, "changed a replay");
            Ok(StoredResponse::json(StatusCode::OK, &ReplayView::new(changed, now)))
        })
    })
    .await
}
