//! `/admin/v1/dead-letters`: messages that consumers gave up.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::operations::dead_letters::{self, Bulk};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{IDEMPOTENCY_KEY, change};
use crate::Administration;
use crate::operator::filters::{DeadLetterChoice, DeadLetterFilters, DeadLetterSelection};
use crate::operator::{DeadLetterView, Error, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(retry_many))
        .routes(routes!(discard_many))
        .routes(routes!(show))
        .routes(routes!(retry))
        .routes(routes!(discard))
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ConsumerDeadLetterRetries)]
struct RetryResult {
    /// How many dead letters are parked again.
    count: u64,
    /// There may be more: repeat the request.
    more: bool,
    /// The number of selected dead letters by consumer that cannot be retried: those of intake queues, and of consumers that no
    /// longer exist.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    without_consumer: BTreeMap<String, i64>,
}

/// List dead letters, oldest first
#[utoipa::path(get, path = "/admin/v1/dead-letters", operation_id = "listConsumerDeadLetters", tag = "operator", params(Listing<DeadLetterFilters>),
    security(("bearer" = [])), responses((status = 200, body = Page<DeadLetterView>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<DeadLetterFilters>,
) -> Result<Page<DeadLetterView>, Problem> {
    let scope = PageScope::global(&admin.cursor_key, "dead-letters", &filters);
    let after = scope.position(cursor.as_deref())?;
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let dead = dead_letters::list(&mut *db, &filters.into_query(), after, i64::from(limit) + 1).await;
    drop(db);
    let page = scope.cut(dead.map_err(Error::Database)?, limit, |dead| dead.id);
    Ok(page.map(DeadLetterView::brief))
}

/// Get a dead letter with its headers and payload
#[utoipa::path(get, path = "/admin/v1/dead-letters/{id}", operation_id = "getConsumerDeadLetter", tag = "operator", params(("id" = i64, Path)),
    security(("bearer" = [])),
    responses((status = 200, body = DeadLetterView), (status = 404, description = "The dead letter does not exist")))]
async fn show(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(id): Path<i64>,
) -> Result<Json<DeadLetterView>, Problem> {
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    Ok(Json(DeadLetterView::full(flow::dead_letter(&mut db, id).await?)))
}

/// Retry a dead letter, with the full number of retries
#[utoipa::path(post, path = "/admin/v1/dead-letters/{id}/retry", operation_id = "retryConsumerDeadLetter", tag = "operator",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, description = "The message is parked again and due now"), (status = 404, description = "The dead letter does not exist"),
        (status = 409, description = "Its consumer no longer exists, or another message with the same event id is parked")))]
async fn retry(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&admin, identity, StatusCode::ACCEPTED, move |tx| Box::pin(flow::retry_dead_letter(tx, id))).await
}

/// Discard a dead letter
#[utoipa::path(post, path = "/admin/v1/dead-letters/{id}/discard", operation_id = "discardConsumerDeadLetter", tag = "operator",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The dead letter is discarded"), (status = 404, description = "The dead letter does not exist")))]
async fn discard(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&admin, identity, StatusCode::NO_CONTENT, move |tx| Box::pin(flow::discard_dead_letter(tx, id))).await
}

/// Retry many dead letters
///
/// Processes up to 100,000 dead letters in transactions of 1,000; `more` tells whether to repeat the request. It needs no
/// Idempotency-Key: retried messages leave the list of dead letters, so a repeated request continues with the rest.
#[utoipa::path(post, path = "/admin/v1/dead-letters/retry", operation_id = "retryConsumerDeadLetters", tag = "operator", request_body = DeadLetterChoice,
    security(("bearer" = [])), responses((status = 200, body = RetryResult)))]
async fn retry_many(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Json(selection): Json<DeadLetterSelection>,
) -> Result<Json<RetryResult>, Problem> {
    let selection = selection.into_query()?;
    let Bulk { count, more } = flow::retry_dead_letters(&admin.db, &selection).await?;
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let without_consumer = dead_letters::without_consumer(&mut *db, &selection).await.map_err(Error::Database)?;
    Ok(Json(RetryResult { count, more, without_consumer: without_consumer.into_iter().collect() }))
}

/// Discard many dead letters
///
/// Processes up to 100,000 dead letters in transactions of 1,000; `more` tells whether to repeat the request. It needs no
/// Idempotency-Key: discarded messages leave the list of dead letters, so a repeated request continues with the rest.
#[utoipa::path(post, path = "/admin/v1/dead-letters/discard", operation_id = "discardConsumerDeadLetters", tag = "operator", request_body = DeadLetterChoice,
    security(("bearer" = [])), responses((status = 200, body = crate::schemas::BulkResult)))]
async fn discard_many(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Json(selection): Json<DeadLetterSelection>,
) -> Result<Json<Bulk>, Problem> {
    Ok(Json(flow::discard_dead_letters(&admin.db, &selection.into_query()?).await?))
}
