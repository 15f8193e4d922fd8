use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use kit::auth::{Operator, Tenant};
use kit::extract::{Json, Path};
use kit::idempotency::{Answer, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::dead_letter::{self, Bulk, Which};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{once, scope};
use crate::app::App;
use crate::operator::{DeadLetterView, Error, flow};

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(retry_many))
        .routes(routes!(discard_many))
        .routes(routes!(show))
        .routes(routes!(retry))
        .routes(routes!(discard))
}

#[derive(Debug, Default, PartialEq, Deserialize, IntoParams, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
struct DeadLetterFilters {
    /// Only this consumer's.
    consumer: Option<String>,
    /// This topic and what is below it.
    #[schema(example = "order")]
    topic: Option<String>,
    tenant: Option<Tenant>,
    /// Given up then or later.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Given up before then.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
}

/// Which dead letters: filters, or all of them.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Chosen {
    consumer: Option<String>,
    /// This topic and what is below it.
    #[schema(example = "order")]
    topic: Option<String>,
    tenant: Option<Tenant>,
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

impl DeadLetterFilters {
    fn which(self) -> Which {
        Which {
            consumer: self.consumer,
            topic: self.topic,
            tenant: self.tenant.map(String::from),
            from: self.from,
            to: self.to,
            ..Which::default()
        }
    }
}

impl Chosen {
    fn which(self) -> Result<Which, Error> {
        let Chosen { consumer, topic, tenant, from, to, all } = self;
        let filters = DeadLetterFilters { consumer, topic, tenant, from, to };
        match (all, filters == DeadLetterFilters::default()) {
            (false, true) => Err(Error::NoFilter),
            (true, false) => Err(Error::AllAndFilters),
            (true, true) | (false, false) => Ok(filters.which()),
        }
    }
}

/// List dead letters, oldest first
#[utoipa::path(get, path = "/admin/v1/dead-letters", tag = "operator", params(Listing<DeadLetterFilters>),
    security(("bearer" = [])), responses((status = 200, body = Page<DeadLetterView>)))]
async fn list(
    State(app): State<App>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<DeadLetterFilters>,
) -> Result<Page<DeadLetterView>, Problem> {
    let scope = scope("dead-letters", &filters);
    let after = cursor.map(|cursor| app.cursor_key.open(&scope, &cursor)).transpose()?;
    let dead = dead_letter::list(&app.db, &filters.which(), after, i64::from(limit) + 1).await;
    let page = Page::cut(dead.map_err(Error::Database)?, limit, &app.cursor_key, &scope, |dead| dead.id);
    Ok(page.map(DeadLetterView::brief))
}

/// Show a dead letter with its content
#[utoipa::path(get, path = "/admin/v1/dead-letters/{id}", tag = "operator", params(("id" = i64, Path)),
    security(("bearer" = [])),
    responses((status = 200, body = DeadLetterView), (status = 404, description = "There is no such dead letter")))]
async fn show(State(app): State<App>, _: Operator, Path(id): Path<i64>) -> Result<Json<DeadLetterView>, Problem> {
    let mut db = app.db.acquire().await.map_err(Error::Database)?;
    Ok(Json(DeadLetterView::whole(flow::dead_letter(&mut db, id).await?)))
}

/// Give a dead letter to its consumer again, with all its retries
#[utoipa::path(post, path = "/admin/v1/dead-letters/{id}/retry", tag = "operator",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 202, description = "It is parked, and due"), (status = 404, description = "There is no such dead letter"),
        (status = 409, description = "Its consumer is not there any more")))]
async fn retry(
    State(app): State<App>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            flow::retry_dead_letter(tx, id).await?;
            Ok(Answer::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}

/// Throw a dead letter away
#[utoipa::path(post, path = "/admin/v1/dead-letters/{id}/discard", tag = "operator",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 204, description = "It is gone"), (status = 404, description = "There is no such dead letter")))]
async fn discard(
    State(app): State<App>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            flow::discard_dead_letter(tx, id).await?;
            Ok(Answer::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Give many dead letters to their consumers again
///
/// In steps of 1,000, each a transaction, up to 100,000; `more` says whether to ask again. It needs no Idempotency-Key:
/// what it was done to is no longer a dead letter, so a repeat does it to the rest.
#[utoipa::path(post, path = "/admin/v1/dead-letters/retry", tag = "operator", request_body = Chosen,
    security(("bearer" = [])), responses((status = 200, body = Bulk)))]
async fn retry_many(State(app): State<App>, _: Operator, Json(chosen): Json<Chosen>) -> Result<Json<Bulk>, Problem> {
    let done = dead_letter::retry_many(&app.db, &chosen.which()?).await;
    Ok(Json(done.map_err(Error::Database)?))
}

/// Throw many dead letters away
///
/// In steps of 1,000, each a transaction, up to 100,000; `more` says whether to ask again. It needs no Idempotency-Key:
/// what it was done to is gone, so a repeat does it to the rest.
#[utoipa::path(post, path = "/admin/v1/dead-letters/discard", tag = "operator", request_body = Chosen,
    security(("bearer" = [])), responses((status = 200, body = Bulk)))]
async fn discard_many(State(app): State<App>, _: Operator, Json(chosen): Json<Chosen>) -> Result<Json<Bulk>, Problem> {
    let done = dead_letter::discard_many(&app.db, &chosen.which()?).await.map_err(Error::Database)?;
    tracing::info!(count = done.count, "an operator has discarded dead letters");
    Ok(Json(done))
}
