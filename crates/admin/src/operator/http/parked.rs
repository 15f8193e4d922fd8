//! `/admin/v1/parked`: messages that failed and wait for their retry.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::auth::Operator;
use http_kit::extract::Path;
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::operations::parked;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{IDEMPOTENCY_KEY, change};
use crate::Administration;
use crate::operator::filters::ConsumerFilter;
use crate::operator::{Error, ParkedView, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(retry)).routes(routes!(discard))
}

/// List parked messages in the order in which they were parked
#[utoipa::path(get, path = "/admin/v1/parked", operation_id = "listParkedMessages", tag = "operator", params(Listing<ConsumerFilter>), security(("bearer" = [])),
    responses((status = 200, body = Page<ParkedView>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<ConsumerFilter>,
) -> Result<Page<ParkedView>, Problem> {
    let scope = PageScope::global(&admin.cursor_key, "parked", &filters);
    let after = scope.position(cursor.as_deref())?;
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let parked = parked::list(&mut *db, filters.consumer.as_deref(), after, i64::from(limit) + 1).await;
    let page = scope.cut(parked.map_err(Error::Database)?, limit, |parked| parked.id);
    Ok(page.map(ParkedView::from))
}

/// Retry a parked message now
///
/// The message becomes due, and the shard worker retries it within seconds. A message that waits behind an earlier message of
/// its key is refused: the earlier message must be retried or discarded first.
#[utoipa::path(post, path = "/admin/v1/parked/{place}/retry", operation_id = "retryParkedMessage", tag = "operator",
    params(("place" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, description = "The message is due"), (status = 404, description = "No parked message has this number"),
        (status = 409, description = "An earlier message of the same key is parked")))]
async fn retry(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(place): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&admin, identity, StatusCode::ACCEPTED, move |tx| Box::pin(flow::retry_parked(tx, place))).await
}

/// Discard a parked message
///
/// The shard worker removes it within seconds or, if it waits behind other messages of its key, when its turn comes.
#[utoipa::path(post, path = "/admin/v1/parked/{place}/discard", operation_id = "discardParkedMessage", tag = "operator",
    params(("place" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, description = "The message is discarded"), (status = 404, description = "No parked message has this number")))]
async fn discard(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(place): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&admin, identity, StatusCode::ACCEPTED, move |tx| Box::pin(flow::discard_parked(tx, place))).await
}
