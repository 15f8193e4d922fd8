use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use kit::auth::Operator;
use kit::extract::{Json, Path};
use kit::idempotency::{Answer, JsonBody, Mutation};
use kit::problem::Problem;
use mailbox::moment::Moment;
use mailbox::status::{self, ConsumerStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::once;
use crate::app::App;
use crate::operator::{Error, flow};

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(reset)).routes(routes!(forget))
}

#[derive(Debug, Serialize, ToSchema)]
struct Consumers {
    items: Vec<ConsumerStatus>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Reset {
    /// Read again what was posted since, and has not taken effect. Absent: go on with what is posted from now on.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
}

/// List the consumers of the log: how far they are, who works for them, what went wrong
#[utoipa::path(get, path = "/admin/v1/consumers", tag = "operator", security(("bearer" = [])),
    responses((status = 200, body = Consumers)))]
async fn list(State(app): State<App>, _: Operator) -> Result<Json<Consumers>, Problem> {
    Ok(Json(Consumers { items: status::consumers(&app.db).await.map_err(Error::Database)? }))
}

/// Let a consumer go on from now, or from a time; one that has lapsed is well again
#[utoipa::path(post, path = "/admin/v1/consumers/{name}/reset", tag = "operator", request_body = Reset,
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 204, description = "It goes on from there"), (status = 404, description = "There is no such consumer")))]
async fn reset(
    State(app): State<App>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<Reset>>,
) -> Result<Answer, Problem> {
    let now = app.clock.now();
    let mut db = app.db.acquire().await.map_err(Error::Database)?;
    let moment = Moment::now(&mut db).await.map_err(Error::Database)?;
    drop(db);
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            flow::reset(tx, &name, body.from, (&moment, now)).await?;
            Ok(Answer::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Forget a consumer that nobody works for; what it had parked becomes dead letters
#[utoipa::path(delete, path = "/admin/v1/consumers/{name}", tag = "operator",
    params(("name" = String, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 204, description = "It is forgotten"), (status = 404, description = "There is no such consumer"),
        (status = 409, description = "Somebody works for it")))]
async fn forget(
    State(app): State<App>,
    _: Operator,
    Path(name): Path<String>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            flow::forget(tx, &name).await?;
            Ok(Answer::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}
