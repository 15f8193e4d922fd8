//! `/admin/v1/replays`: reading a time range of the log again.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::operations::replays::{self, Replay, Request};
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{IDEMPOTENCY_KEY, change};
use crate::Administration;
use crate::operator::filters::ConsumerFilter;
use crate::operator::{Error, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(show, cancel))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewConsumerReplay, example = json!({"consumer": "joins.events", "from": "2026-01-01T00:00:00Z"}))]
struct CreateReplay {
    /// The name of a consumer, as `/admin/v1/consumers` lists it.
    consumer: String,
    /// Messages that were posted at this time or later.
    #[serde(deserialize_with = "http_kit::instant::required")]
    from: DateTime<Utc>,
    /// Messages that were posted before this time. Absent: now.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Whether to process messages again that have already taken effect.
    #[serde(default)]
    again: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CreatedConsumerReplay)]
struct CreatedReplay {
    id: i64,
}

/// List replays with their progress, newest first
#[utoipa::path(get, path = "/admin/v1/replays", operation_id = "listConsumerReplays", tag = "operator", params(Listing<ConsumerFilter>), security(("bearer" = [])),
    responses((status = 200, body = Page<crate::schemas::ConsumerReplay>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<ConsumerFilter>,
) -> Result<Page<Replay>, Problem> {
    let scope = PageScope::global(&admin.cursor_key, "replays", &filters);
    let before = scope.position(cursor.as_deref())?;
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let replays = replays::list(&mut *db, filters.consumer.as_deref(), before, i64::from(limit) + 1).await;
    Ok(scope.cut(replays.map_err(Error::Database)?, limit, |replay| replay.id))
}

/// Get a replay with its progress
#[utoipa::path(get, path = "/admin/v1/replays/{id}", operation_id = "getConsumerReplay", tag = "operator", params(("id" = i64, Path)),
    security(("bearer" = [])),
    responses((status = 200, body = crate::schemas::ConsumerReplay), (status = 404, description = "The replay does not exist")))]
async fn show(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(id): Path<i64>,
) -> Result<Json<Replay>, Problem> {
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    Ok(Json(flow::replay(&mut db, id).await?))
}

/// Start a replay: a consumer reads a time range again
///
/// A handler processes the messages that have not taken effect, or with `again` all of them. A relay route publishes all of
/// them again, each with its original id.
#[utoipa::path(post, path = "/admin/v1/replays", operation_id = "createConsumerReplay", tag = "operator", request_body = CreateReplay,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, body = CreatedReplay), (status = 404, description = "The consumer does not exist")))]
async fn create(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<CreateReplay>>,
) -> Result<StoredResponse, Problem> {
    let to = body.to.unwrap_or_else(|| admin.clock.now());
    let request = Request { consumer: body.consumer, from: body.from, to, again: body.again };
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let id = flow::request_replay(tx, &request).await?;
            Ok(StoredResponse::json(StatusCode::ACCEPTED, &CreatedReplay { id }))
        })
    })
    .await
}

/// Cancel a replay
///
/// The consumer stops within seconds; messages that it has already processed stay processed. A replay that has ended does not
/// change.
#[utoipa::path(delete, path = "/admin/v1/replays/{id}", operation_id = "cancelConsumerReplay", tag = "operator",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The replay does not continue"), (status = 404, description = "The replay does not exist")))]
async fn cancel(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    change(&admin, identity, StatusCode::NO_CONTENT, move |tx| Box::pin(flow::cancel_replay(tx, id))).await
}
