//! `/admin/v1/consumers`: the consumers of the log.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::Problem;
use pillarbox::log::Snapshot;
use pillarbox::operations::status::ConsumerStatus;
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use crate::Administration;
use crate::operator::{self, Error, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(reset)).routes(routes!(drop_consumer))
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ConsumerList)]
struct Consumers {
    #[schema(value_type = Vec<crate::schemas::ConsumerStatus>)]
    items: Vec<ConsumerStatus>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ConsumerReset, example = json!({"from": "2026-01-01T00:00:00Z"}))]
struct Reset {
    /// The consumer reads again what was posted since this time and has not taken effect. Absent: it continues with messages
    /// that are posted from now on.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
}

/// List the consumers of the log with their lag, shard workers and failures
#[utoipa::path(get, path = "/admin/v1/consumers", operation_id = "listConsumers", tag = "operator", security(("bearer" = [])),
    responses((status = 200, body = Consumers)))]
async fn list(State(admin): State<Arc<Administration>>, _: Operator) -> Result<Json<Consumers>, Problem> {
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    Ok(Json(Consumers { items: operator::consumers(&mut *db).await.map_err(Error::Database)? }))
}

/// Reset a consumer to now or to a time; a lapsed consumer resumes
#[utoipa::path(post, path = "/admin/v1/consumers/{name}/reset", operation_id = "resetConsumer", tag = "operator", request_body = Reset,
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The consumer is reset"), (status = 404, description = "The consumer does not exist")))]
async fn reset(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<Reset>>,
) -> Result<StoredResponse, Problem> {
    let now = admin.clock.now();
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let snapshot = Snapshot::now(&mut db).await.map_err(Error::Database)?;
    drop(db);
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::reset(tx, &name, body.from, (&snapshot, now)).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Drop a consumer that no process runs; its parked messages become dead letters
#[utoipa::path(delete, path = "/admin/v1/consumers/{name}", operation_id = "deleteConsumer", tag = "operator",
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The consumer is dropped"), (status = 404, description = "The consumer does not exist"),
        (status = 409, description = "A running process uses the consumer")))]
async fn drop_consumer(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::drop_consumer(tx, &name).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}
