use axum::extract::State;
use axum::http::StatusCode;
use kit::auth::Operator;
use kit::extract::Path;
use kit::idempotency::{Answer, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::parked;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{once, scope};
use crate::app::App;
use crate::operator::{Error, ParkedView, flow};

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(retry)).routes(routes!(discard))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ParkedFilters {
    /// Only this consumer's.
    consumer: Option<String>,
}

/// List parked messages, in the order of parking
#[utoipa::path(get, path = "/admin/v1/parked", tag = "operator", params(Listing<ParkedFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<ParkedView>)))]
async fn list(
    State(app): State<App>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<ParkedFilters>,
) -> Result<Page<ParkedView>, Problem> {
    let scope = scope("parked", &filters);
    let after = cursor.map(|cursor| app.cursor_key.open(&scope, &cursor)).transpose()?;
    let parked = parked::list(&app.db, filters.consumer.as_deref(), after, i64::from(limit) + 1).await;
    let page = Page::cut(parked.map_err(Error::Database)?, limit, &app.cursor_key, &scope, |parked| parked.place);
    Ok(page.map(ParkedView::from))
}

/// Try a parked message at once
///
/// It is due then, and its owner tries it within seconds. One that waits behind an earlier message of its key is refused:
/// the earlier one comes first.
#[utoipa::path(post, path = "/admin/v1/parked/{place}/retry", tag = "operator",
    params(("place" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 202, description = "It is due"), (status = 404, description = "Nothing is parked there"),
        (status = 409, description = "An earlier message of its key comes first")))]
async fn retry(
    State(app): State<App>,
    _: Operator,
    Path(place): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            flow::retry_parked(tx, place).await?;
            Ok(Answer::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}

/// Throw a parked message away
///
/// Its owner passes it, within seconds or, if it waits behind others of its key, when its turn comes.
#[utoipa::path(post, path = "/admin/v1/parked/{place}/discard", tag = "operator",
    params(("place" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")),
    security(("bearer" = [])),
    responses((status = 202, description = "It is discarded"), (status = 404, description = "Nothing is parked there")))]
async fn discard(
    State(app): State<App>,
    _: Operator,
    Path(place): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<Answer, Problem> {
    once(&app, identity.as_ref(), |tx| {
        Box::pin(async move {
            flow::discard_parked(tx, place).await?;
            Ok(Answer::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}
