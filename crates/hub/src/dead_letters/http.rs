//! Dead letters: listing, retrying and discarding them.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http::StatusCode;
use http_kit::auth::Caller;
use http_kit::extract::{Json, Path};
use http_kit::field::Whole;
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::page::{Listing, Page};
use http_kit::problem::Problem;
use serde::Deserialize;
use serde_json::json;
use service::idempotency::StoreResponse;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::Hub;
use crate::access::{Manager, page_scope, type_prefix};
use crate::dead_letters::flow;
use crate::dead_letters::flow::{BulkAction, CHANGED_MAX, Changed};
use crate::dead_letters::store::DeadLetterFilter;
use crate::dead_letters::view::{DeadLetterView, DiscardedMany, Retried};
use crate::deliveries::domain::Reason;
use crate::error::Error;

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(retry_many))
        .routes(routes!(discard_many))
        .routes(routes!(show))
        .routes(routes!(retry))
        .routes(routes!(discard))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeadLetterFilters {
    subscriber_id: Option<Uuid>,
    /// This type and all types below it.
    #[param(example = "order")]
    event_type: Option<String>,
    reason: Option<Reason>,
    /// Given up at this time or later.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Given up before this time.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Whether a retry was requested.
    retried: Option<bool>,
}

/// The dead letters to retry or to discard: those that match all given filters, or all of them.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DeadLetterSelection)]
struct BulkSelection {
    subscriber_id: Option<Uuid>,
    /// This type and all types below it.
    #[schema(example = "order")]
    event_type: Option<String>,
    reason: Option<Reason>,
    /// Given up at this time or later.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Given up before this time.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// All dead letters. Cannot be combined with a filter.
    #[serde(default)]
    all: bool,
    /// The number of dead letters that this request changes at most. It is rounded up to thousands.
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 100_000, default = 100_000)]
    limit: Option<Whole>,
}

/// Describes a [`BulkSelection`] that is not empty.
struct BulkChoice;

impl PartialSchema for BulkChoice {
    fn schema() -> RefOr<Schema> {
        http_kit::openapi::filters_or_all(BulkSelection::schema(), json!({"event_type": "order"}))
    }
}

impl ToSchema for BulkChoice {
    fn name() -> std::borrow::Cow<'static, str> {
        BulkSelection::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        BulkSelection::schemas(schemas);
    }
}

impl BulkSelection {
    fn limit(&self) -> Result<u64, Error> {
        match self.limit {
            None => Ok(CHANGED_MAX),
            Some(Whole(limit)) if (1..=CHANGED_MAX as i64).contains(&limit) => Ok(limit as u64),
            Some(_) => Err(Error::field("/limit", format!("must be a number from 1 to {CHANGED_MAX}"))),
        }
    }

    /// Fails without a filter and without `all`, so that an empty body does not retry or discard everything by mistake.
    fn into_filter(self) -> Result<DeadLetterFilter, Error> {
        let BulkSelection { subscriber_id, event_type, reason, from, to, all, limit: _ } = self;
        let event_type = type_prefix(event_type);
        let filter = DeadLetterFilter { subscriber: subscriber_id, event_type, reason, from, to, retried: None };
        let is_empty = filter == DeadLetterFilter::default();
        if is_empty && !all {
            Err(Error::field("", "must contain at least one filter, or `all: true`"))
        } else if all && !is_empty {
            Err(Error::field("/all", "cannot be combined with filters: omit one of them"))
        } else {
            Ok(filter)
        }
    }
}

/// List dead letters, newest first
///
/// A dead letter is a message that was given up: its retries failed, the subscriber refused it, or an operator gave it
/// up.
#[utoipa::path(get, path = "/hub/v1/dead-letters", operation_id = "listDeadLetters", tag = "hub", params(Listing<DeadLetterFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<DeadLetterView>)))]
async fn list(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Listing { filters, limit, cursor }: Listing<DeadLetterFilters>,
) -> Result<Page<DeadLetterView>, Problem> {
    let scope = page_scope(&hub, "dead-letters", &caller, &filters);
    let before = scope.position(cursor.as_deref())?;
    let DeadLetterFilters { subscriber_id, event_type, reason, from, to, retried } = filters;
    let event_type = type_prefix(event_type);
    let filter = DeadLetterFilter { subscriber: subscriber_id, event_type, reason, from, to, retried };
    let dead = flow::list(&hub, &caller.tenant, &filter, before, limit + 1).await?;
    Ok(scope.cut(dead, limit, |dead| dead.id).map(DeadLetterView::summary))
}

/// Show a dead letter, with snapshots of its event and its subscriber
#[utoipa::path(get, path = "/hub/v1/dead-letters/{id}", operation_id = "getDeadLetter", tag = "hub", params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 200, body = DeadLetterView), (status = 404, description = "There is no such dead letter")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
) -> Result<Json<DeadLetterView>, Problem> {
    Ok(Json(DeadLetterView::with_snapshots(flow::show(&hub, &caller.tenant, id).await?)))
}

/// Retry a dead letter
///
/// The message is sent again at the end of its lane, with all its retries. If it blocks its lane, it is sent first. A
/// dead letter can be retried once; if the message fails again, it becomes a new dead letter.
#[utoipa::path(post, path = "/hub/v1/dead-letters/{id}/retry", operation_id = "retryDeadLetter", tag = "hub",
    params(("id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 202, description = "The retry is requested"),
        (status = 404, description = "There is no such dead letter"),
        (status = 409,
        description = "The dead letter was already retried, or its event or subscriber no longer exists")))]
async fn retry(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            flow::retry(tx, &caller.tenant, id, caller.principal, hub.clock.now()).await?;
            Ok(StoredResponse::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}

/// Retry many dead letters, oldest first
///
/// Retries up to 100,000 dead letters, or `limit`, in transactions of 1,000. Repeat the request while the response says `more`. It
/// needs no `Idempotency-Key`: dead letters that were already retried are skipped, so a repeated request continues with
/// the rest.
#[utoipa::path(post, path = "/hub/v1/dead-letters/retry", operation_id = "retryDeadLetters", tag = "hub", request_body = BulkChoice, security(("bearer" = [])),
    responses((status = 200, body = Retried)))]
async fn retry_many(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Json(selection): Json<BulkSelection>,
) -> Result<Json<Retried>, Problem> {
    let Changed { count, more } = change_many(&hub, caller, BulkAction::Retry, selection).await?;
    Ok(Json(Retried { retried: count, more }))
}

/// Discard a dead letter
///
/// It is deleted for good, and the message is not sent again. If it blocks its lane, the later messages of the lane are sent.
#[utoipa::path(post, path = "/hub/v1/dead-letters/{id}/discard", operation_id = "discardDeadLetter", tag = "hub",
    params(("id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])),
    responses((status = 204, description = "The dead letter is discarded"),
        (status = 404, description = "There is no such dead letter"),
        (status = 409, description = "A retry of the dead letter was requested")))]
async fn discard(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    hub.run_once(identity.as_ref(), StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            flow::discard(tx, &caller.tenant, id, caller.principal).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Discard many dead letters, oldest first
///
/// Discards up to 100,000 dead letters, or `limit`, in transactions of 1,000. Repeat the request while the response says `more`. Dead
/// letters for which a retry was requested are skipped.
#[utoipa::path(post, path = "/hub/v1/dead-letters/discard", operation_id = "discardDeadLetters", tag = "hub", request_body = BulkChoice, security(("bearer" = [])),
    responses((status = 200, body = DiscardedMany)))]
async fn discard_many(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Json(selection): Json<BulkSelection>,
) -> Result<Json<DiscardedMany>, Problem> {
    let Changed { count, more } = change_many(&hub, caller, BulkAction::Discard, selection).await?;
    Ok(Json(DiscardedMany { discarded: count, more }))
}

async fn change_many(
    hub: &Hub,
    caller: Caller,
    action: BulkAction,
    selection: BulkSelection,
) -> Result<Changed, Error> {
    let limit = selection.limit()?;
    flow::change_many(hub, &caller.tenant, action, selection.into_filter()?, limit, caller.principal).await
}
