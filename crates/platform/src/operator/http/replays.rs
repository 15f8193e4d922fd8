use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use kit::auth::Operator;
use kit::extract::Path;
use kit::idempotency::{Answer, JsonBody, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::replay::{self, Replay, Request};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{once, scope};
use crate::app::App;
use crate::operator::{Error, flow};

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(cancel))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CreateReplay {
    #[schema(example = "relay.default")]
    consumer: String,
    /// What was posted then or later.
    #[serde(deserialize_with = "kit::instant::required")]
    from: DateTime<Utc>,
    /// What was posted before then; now when absent.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Repeat what has taken effect already, too.
    #[serde(default)]
    again: bool,
}

#[derive(Debug, Serialize, ToSchema)]
struct CreatedReplay {
    id: i64,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReplayFilters {
    /// Only this consumer's.
    consumer: Option<String>,
}

/// List replays, newest first, with how far they have come
#[utoipa::path(get, path = "/admin/v1/replays", tag = "operator", params(Listing<ReplayFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<Replay>)))]
async fn list(
    State(app): State<App>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<ReplayFilters>,
) -> Result<Page<Replay>, Problem> {
    let scope = scope("replays", &filters);
    let before = cursor.map(|cursor| app.cursor_key.open(&scope, &cursor)).transpose()?;
    let replays = replay::list(&app.db, filters.consumer.as_deref(), before, i64::from(limit) + 1).await;
    Ok(Page::cut(replays.map_err(Error::Database)?, limit, &app.cursor_key, &scope, |replay| replay.id))
}

/// Let a consumer read a time range again
///
/// A handler acts on what has not yet taken effect, or with `again` on everything; a relay sends everything again, each
/// message with the id that it had.
#[utoipa::path(post, path = "/admin/v1/replays", tag = "operator", request_body = CreateReplay,
    params(("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 202, body = CreatedReplay), (status = 404, description = "There is no such consumer")))]
async fn create(
    State(app): State<App>,
    _: Operator,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<CreateReplay>>,
) -> Result<Answer, Problem> {
    let to = body.to.unwrap_or_else(|| app.clock.now());
    let request = Request { consumer: body.consumer, from: body.from, to, again: body.again };
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            let id = flow::replay(tx, &request).await?;
            Ok(Answer::json(StatusCode::ACCEPTED, &CreatedReplay { id }))
        })
    })
    .await
}

/// Call a replay off
///
/// Its consumer stops within seconds; what it has repeated by then stays repeated. One that has ended stays as it is.
#[utoipa::path(delete, path = "/admin/v1/replays/{id}", tag = "operator",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 204, description = "It does not go on"), (status = 404, description = "There is no such replay")))]
async fn cancel(
    State(app): State<App>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            flow::cancel_replay(tx, id).await?;
            Ok(Answer::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}
