//! Messages (events for one subscriber) and their attempts.

use std::sync::Arc;

use axum::extract::State;
use http::StatusCode;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::page::{Listing, Page};
use http_kit::problem::Problem;
use serde::{Deserialize, Serialize};
use service::idempotency::StoreResponse;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::Hub;
use crate::access::{Manager, page_scope};
use crate::deliveries::domain::Outcome;
use crate::events::flow;
use crate::events::view::message::{AttemptView, MessageId, MessageView};

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(attempts))
        .routes(routes!(dead_letter))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MessageFilters {
    /// Only messages for this subscriber. Without it: for all subscribers of the tenant.
    subscriber_id: Option<Uuid>,
    /// Only messages with this outcome.
    #[param(inline)]
    outcome: Option<MessageOutcome>,
}

/// The outcome of a message.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum MessageOutcome {
    Delivered,
    Pending,
    Failed,
    Dead,
}

/// The attempts to deliver a message.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubAttempts)]
struct Attempts {
    items: Vec<AttemptView>,
}

impl From<MessageOutcome> for Outcome {
    fn from(outcome: MessageOutcome) -> Outcome {
        match outcome {
            MessageOutcome::Delivered => Outcome::Delivered,
            MessageOutcome::Pending => Outcome::Pending,
            MessageOutcome::Failed => Outcome::Failed,
            MessageOutcome::Dead => Outcome::Dead,
        }
    }
}

/// List messages, newest first
///
/// Those of one subscriber, or of all subscribers that exist. An event is listed once for each subscriber, with the state of
/// the last time that it was sent: a message that is retried or replayed moves to the beginning of the list.
///
/// Each page searches a bounded number of messages. With an `outcome`, or after many messages were sent again, a page can
/// therefore be short or empty and still have a `next_cursor`.
#[utoipa::path(get, path = "/hub/v1/messages", operation_id = "listMessages", tag = "hub", params(Listing<MessageFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<MessageView>), (status = 404, description = "There is no such subscriber")))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<MessageFilters>,
) -> Result<Page<MessageView>, Problem> {
    let scope = page_scope(&hub, "messages", &caller, &filters);
    let before = scope.position(cursor.as_deref())?;
    let outcome = filters.outcome.map(Outcome::from);
    let (items, before) = flow::messages(&hub, &caller.tenant, filters.subscriber_id, outcome, before, limit).await?;
    Ok(Page { items, next_cursor: before.map(|before| scope.cursor(&before)) })
}

/// Show a message
///
/// A message is one event for one subscriber.
#[utoipa::path(get, path = "/hub/v1/messages/{id}", operation_id = "getMessage", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\.[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", description = "The UUIDs of the event and the subscriber, joined by a dot")),
    responses((status = 200, body = MessageView),
        (status = 404, description = "There is no such message, or its retention has expired")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<MessageId>,
) -> Result<Json<MessageView>, Problem> {
    Ok(Json(flow::message(&hub, &caller.tenant, id).await?))
}

/// List the attempts to deliver a message, oldest first
#[utoipa::path(get, path = "/hub/v1/messages/{id}/attempts", operation_id = "listMessageAttempts", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\.[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", description = "The UUIDs of the event and the subscriber, joined by a dot")),
    responses((status = 200, body = Attempts),
        (status = 404, description = "There is no such message, or its retention has expired")))]
async fn attempts(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<MessageId>,
) -> Result<Json<Attempts>, Problem> {
    let attempts = flow::attempts(&hub, &caller.tenant, id).await?;
    Ok(Json(Attempts { items: attempts.into_iter().map(AttemptView::from).collect() }))
}

/// Give a message up
///
/// The message becomes a dead letter, and later messages of its lane continue. This happens within seconds unless the
/// message is delivered first. While the subscriber is paused, it happens when the pause ends.
#[utoipa::path(post, path = "/hub/v1/messages/{id}/dead-letter", operation_id = "giveUpMessage", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, pattern = r"^(evt_)?[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\.[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", description = "The UUIDs of the event and the subscriber, joined by a dot"),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    responses((status = 202, description = "Giving the message up is requested"),
        (status = 404, description = "There is no such message, or its retention has expired"),
        (status = 409, description = "The message is already delivered or a dead letter")))]
async fn dead_letter(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<MessageId>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            flow::give_up(tx, &caller.tenant, id, caller.principal).await?;
            Ok(StoredResponse::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}
