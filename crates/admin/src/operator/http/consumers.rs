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
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use crate::Administration;
use crate::operator::{self, ConsumerView, Error, flow};

pub(super) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(reset)).routes(routes!(drop_consumer))
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ConsumerList)]
struct Consumers {
    #[schema(value_type = Vec<crate::operator::ConsumerSchema>)]
    items: Vec<ConsumerView>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ConsumerReset, example = json!({"from": "2026-01-01T00:00:00Z"}))]
struct Reset {
    /// The consumer reads again what was posted since this time and has not taken effect. Absent: it continues with messages
    /// that are posted from now on.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// The consumer continues exactly where this consumer has stopped. No process may run either of them.
    like: Option<String>,
    /// Whether unread messages may be skipped. With `false`, a reset without `from` is refused if there are any.
    #[serde(default = "yes")]
    skip_unread: bool,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ConsumerResetResult)]
struct ResetResult {
    /// The number of messages of the log that the consumer had not read. Without `from`, it skips them.
    unread: i64,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DroppedConsumer)]
struct Dropped {
    /// The number of its messages that were parked and are dead letters now.
    dead_letters: u64,
}

/// List the consumers of the log with their lag, shard workers and failures
#[utoipa::path(get, path = "/admin/v1/consumers", operation_id = "listConsumers", tag = "operator", security(("bearer" = [])),
    responses((status = 200, body = Consumers)))]
async fn list(State(admin): State<Arc<Administration>>, _: Operator) -> Result<Json<Consumers>, Problem> {
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let items = operator::consumers_with_state(&mut *db, &admin.health.report()).await.map_err(Error::Database)?;
    Ok(Json(Consumers { items }))
}

/// Reset a consumer to now, to a time, or to the position of another consumer; a lapsed consumer resumes
#[utoipa::path(post, path = "/admin/v1/consumers/{name}/reset", operation_id = "resetConsumer", tag = "operator", request_body = Reset,
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = ResetResult), (status = 404, description = "The consumer does not exist"),
        (status = 409, description = "The consumer would skip messages, or cannot continue where the other one has stopped")))]
async fn reset(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<Reset>>,
) -> Result<StoredResponse, Problem> {
    let mut db = admin.db.acquire().await.map_err(Error::Database)?;
    let snapshot = Snapshot::now(&mut db).await.map_err(Error::Database)?;
    drop(db);
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let Reset { from, like, skip_unread } = body;
            let unread = match (like, from) {
                (Some(_), Some(_)) => return Err(Error::FromAndLike.into()),
                (Some(other), None) => flow::continue_like(tx, &name, &other).await.map(|()| 0)?,
                (None, from) => flow::reset(tx, &name, flow::Reset { from, skip_unread }, &snapshot).await?,
            };
            Ok(StoredResponse::json(StatusCode::OK, &ResetResult { unread }))
        })
    })
    .await
}

/// Drop a consumer that no process runs; its parked messages become dead letters
#[utoipa::path(delete, path = "/admin/v1/consumers/{name}", operation_id = "deleteConsumer", tag = "operator",
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = Dropped), (status = 404, description = "The consumer does not exist"),
        (status = 409, description = "A running process uses the consumer")))]
async fn drop_consumer(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let dead_letters = flow::drop_consumer(tx, &name).await?;
            Ok(StoredResponse::json(StatusCode::OK, &Dropped { dead_letters }))
        })
    })
    .await
}
