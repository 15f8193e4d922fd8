use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use kit::extract::{Json, Path};
use kit::idempotency::{Answer, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::idempotency::Keep;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{Manager, once, scope, topic};
use crate::Hub;
use crate::domain::Reason;
use crate::error::Error;
use crate::flow::dead_letter::{self as flow, Retried};
use crate::store::dead_letter::Which;
use crate::view::DeadLetterView;

pub(super) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(retry_many)).routes(routes!(show)).routes(routes!(retry))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeadLetterFilters {
    subscriber_id: Option<Uuid>,
    /// This type and what is below it.
    #[param(example = "order")]
    event_type: Option<String>,
    reason: Option<Reason>,
    /// Given up then or later.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Given up before then.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Whether somebody had them sent again.
    retried: Option<bool>,
}

/// Which dead letters: filters, or all of them.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ChosenDeadLetters)]
struct Chosen {
    subscriber_id: Option<Uuid>,
    /// This type and what is below it.
    #[schema(example = "order")]
    event_type: Option<String>,
    reason: Option<Reason>,
    /// Given up then or later.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Given up before then.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// All that there are, without a filter.
    #[serde(default)]
    all: bool,
}

impl Chosen {
    fn which(self) -> Result<Which, Error> {
        let Chosen { subscriber_id, event_type, reason, from, to, all } = self;
        let event_type = topic(event_type);
        let which = Which { subscriber: subscriber_id, event_type, reason, from, to, retried: None };
        match (all, which == Which::default()) {
            (false, true) => Err(Error::field("", "name at least one filter, or say `all: true`")),
            (true, false) => Err(Error::field("/all", "say `all: true` alone, or filters")),
            (true, true) | (false, false) => Ok(which),
        }
    }
}

/// List dead letters, newest first
#[utoipa::path(get, path = "/hub/v1/dead-letters", tag = "hub", params(Listing<DeadLetterFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<DeadLetterView>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<DeadLetterFilters>,
) -> Result<Page<DeadLetterView>, Problem> {
    let scope = scope("dead-letters", &caller, &filters);
    let before = cursor.map(|cursor| hub.cursor_key.open(&scope, &cursor)).transpose()?;
    let DeadLetterFilters { subscriber_id, event_type, reason, from, to, retried } = filters;
    let which = Which { subscriber: subscriber_id, event_type: topic(event_type), reason, from, to, retried };
    let dead = flow::list(&hub, &caller.tenant, &which, (before, limit + 1)).await?;
    Ok(Page::cut(dead, limit, &hub.cursor_key, &scope, |dead| dead.id).map(DeadLetterView::brief))
}

/// Show a dead letter, with its event and its subscriber as they were
#[utoipa::path(get, path = "/hub/v1/dead-letters/{id}", tag = "hub", params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 200, body = DeadLetterView), (status = 404, description = "There is no such dead letter")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
) -> Result<Json<DeadLetterView>, Problem> {
    let (dead, snapshots) = flow::show(&hub, &caller.tenant, id).await?;
    Ok(Json(DeadLetterView::whole(dead, snapshots)))
}

/// Send a dead letter again, behind what its lane has by then, with all its retries
#[utoipa::path(post, path = "/hub/v1/dead-letters/{id}/retry", tag = "hub",
    params(("id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 202, description = "It is asked for"), (status = 404, description = "There is no such dead letter"),
        (status = 409, description = "It was retried already, or its subscriber is not there any more")))]
async fn retry(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    let now = hub.clock.now();
    let answer = once(&hub, identity.as_ref(), Keep::Answer, |tx| {
        Box::pin(async move {
            flow::retry(tx, (&caller.tenant, id), caller.principal, now).await?;
            Ok(Answer::empty(StatusCode::ACCEPTED))
        })
    })
    .await?;
    hub.watcher.nudge();
    Ok(answer)
}

/// Send many dead letters again, the oldest first
///
/// In steps of 1,000, each a transaction, up to 100,000; `more` says whether to ask again. It needs no Idempotency-Key: what
/// was retried is passed over, so a repeat does it to the rest.
#[utoipa::path(post, path = "/hub/v1/dead-letters/retry", tag = "hub", request_body = Chosen, security(("bearer" = [])),
    responses((status = 200, body = Retried)))]
async fn retry_many(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Json(chosen): Json<Chosen>,
) -> Result<Json<Retried>, Problem> {
    let which = chosen.which()?;
    Ok(Json(flow::retry_many(&hub, &caller.tenant, &which, caller.principal, hub.clock.now()).await?))
}
