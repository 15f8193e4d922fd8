use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use kit::extract::{Json, Path};
use kit::idempotency::{Answer, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::idempotency::Keep;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{Manager, once, scope};
use crate::Hub;
use crate::domain::Outcome;
use crate::flow::event as flow;
use crate::view::{AttemptView, MessageId, MessageView};

pub(super) fn router() -> OpenApiRouter<Arc<Hub>> {
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
    /// Whose.
    subscriber_id: Uuid,
    #[param(inline)]
    outcome: Option<MessageOutcome>,
}

/// What can have become of a message.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum MessageOutcome {
    Delivered,
    Pending,
    Failed,
    Dead,
}

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

/// List a subscriber's messages, newest first
///
/// With an outcome, a page looks through a bounded number of messages: it can be short, or empty, and have a next one.
#[utoipa::path(get, path = "/hub/v1/messages", tag = "hub", params(Listing<MessageFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<MessageView>), (status = 404, description = "There is no such subscriber")))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<MessageFilters>,
) -> Result<Page<MessageView>, Problem> {
    let scope = scope("messages", &caller, &filters);
    let before = cursor.map(|cursor| hub.cursor_key.open(&scope, &cursor)).transpose()?;
    let wanted = (filters.subscriber_id, filters.outcome.map(Outcome::from));
    let (items, before) = flow::messages(&hub, &caller.tenant, wanted, (before, limit)).await?;
    Ok(Page { items, next_cursor: before.map(|before| hub.cursor_key.seal(&scope, &before)) })
}

/// Show a message: an event on its way to a subscriber
#[utoipa::path(get, path = "/hub/v1/messages/{id}", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, description = "The UUID of an event and that of a subscriber, joined by a dot")),
    responses((status = 200, body = MessageView), (status = 404, description = "There is no such message")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<MessageId>,
) -> Result<Json<MessageView>, Problem> {
    Ok(Json(flow::message(&hub, &caller.tenant, id).await?))
}

/// List every attempt to send a message, in their order
#[utoipa::path(get, path = "/hub/v1/messages/{id}/attempts", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, description = "The UUID of an event and that of a subscriber, joined by a dot")),
    responses((status = 200, body = Attempts), (status = 404, description = "There is no such message")))]
async fn attempts(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<MessageId>,
) -> Result<Json<Attempts>, Problem> {
    let attempts = flow::attempts(&hub, &caller.tenant, id).await?;
    Ok(Json(Attempts { items: attempts.into_iter().map(AttemptView::from).collect() }))
}

/// Give a message up; it becomes a dead letter, and those behind it go on
///
/// Done within seconds, unless it is delivered before that; while its subscriber is paused, when that ends.
#[utoipa::path(post, path = "/hub/v1/messages/{id}/dead-letter", tag = "hub", security(("bearer" = [])),
    params(("id" = String, Path, description = "The UUID of an event and that of a subscriber, joined by a dot"),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    responses((status = 202, description = "It is asked for"), (status = 404, description = "There is no such message"),
        (status = 409, description = "It is delivered or dead already")))]
async fn dead_letter(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<MessageId>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    let answer = once(&hub, identity.as_ref(), Keep::Answer, |tx| {
        Box::pin(async move {
            flow::give_up(tx, &caller.tenant, id, caller.principal).await?;
            Ok(Answer::empty(StatusCode::ACCEPTED))
        })
    })
    .await?;
    hub.watcher.nudge();
    Ok(answer)
}
