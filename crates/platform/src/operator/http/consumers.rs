//! `/admin/v1/consumers`: the consumers of the log.

use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use kit::auth::Operator;
use kit::extract::{Json, Path};
use kit::idempotency::{JsonBody, Mutation, StoredResponse};
use kit::problem::Problem;
use mailbox::idempotency::{StoreResponse, run_once};
use mailbox::log::Snapshot;
use mailbox::operations::status::{self, ConsumerStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use crate::app::App;
use crate::operator::{Error, flow};

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(reset)).routes(routes!(drop_consumer))
}

#[derive(Debug, Serialize, ToSchema)]
struct Consumers {
    items: Vec<ConsumerStatus>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"from": "2026-01-01T00:00:00Z"}))]
struct Reset {
    /// The consumer reads again what was posted since this time and has not taken effect. Absent: it continues with messages
    /// that are posted from now on.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
}

/// List the consumers of the log with their lag, shard workers and failures
#[utoipa::path(get, path = "/admin/v1/consumers", tag = "operator", security(("bearer" = [])),
    responses((status = 200, body = Consumers)))]
async fn list(State(app): State<App>, _: Operator) -> Result<Json<Consumers>, Problem> {
    Ok(Json(Consumers { items: status::consumers(app.db.pool()).await.map_err(Error::Database)? }))
}

/// Reset a consumer to now or to a time; a lapsed consumer resumes
#[utoipa::path(post, path = "/admin/v1/consumers/{name}/reset", tag = "operator", request_body = Reset,
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The consumer is reset"), (status = 404, description = "The consumer does not exist")))]
async fn reset(
    State(app): State<App>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<Reset>>,
) -> Result<StoredResponse, Problem> {
    let now = app.clock.now();
    let mut db = app.db.acquire().await.map_err(Error::Database)?;
    let snapshot = Snapshot::now(&mut db).await.map_err(Error::Database)?;
    drop(db);
    run_once(&app.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::reset(tx, &name, body.from, (&snapshot, now)).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Drop a consumer that no process runs; its parked messages become dead letters
#[utoipa::path(delete, path = "/admin/v1/consumers/{name}", tag = "operator",
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The consumer is dropped"), (status = 404, description = "The consumer does not exist"),
        (status = 409, description = "A running process uses the consumer")))]
async fn drop_consumer(
    State(app): State<App>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    run_once(&app.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::drop_consumer(tx, &name).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}
