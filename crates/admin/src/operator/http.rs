//! The operator's HTTP API, under `/admin/v1`. Every handler requires an [`http_kit::auth::Operator`]. A change that is one
//! transaction accepts an `Idempotency-Key`.

mod consumers;
mod dead_letters;
mod log;
mod parked;
mod replays;

use std::pin::Pin;
use std::sync::Arc;

use axum::http::StatusCode;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::openapi::{self, RouteProblem};
use http_kit::problem::Problem;
use service::idempotency::{StoreResponse, run_once};
use sqlx::PgConnection;
use utoipa_axum::router::OpenApiRouter;

use super::Error;
use crate::Administration;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";

/// The problems of the operator's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("GET /admin/v1/log/{event_id}", 404, "message-not-found", "the log has no message with this id"),
    ("* /admin/v1/consumers/{name}*", 404, "consumer-not-found", "there is no consumer with this name"),
    ("* /admin/v1/consumers/{name}*", 409, "consumer-in-use", "consumer joins.events is in use"),
    (
        "POST /admin/v1/consumers/{name}/reset",
        409,
        "cannot-continue",
        "notify.mail has lapsed, or has yet to finish a replay, so its position does not tell what it has processed",
    ),
    ("POST /admin/v1/parked/*", 404, "parked-not-found", "nothing is parked under this place number (any more)"),
    ("POST /admin/v1/parked/{place}/retry", 409, "parked-behind", "an earlier message of the same key is parked"),
    ("* /admin/v1/dead-letters/{id}*", 404, "dead-letter-not-found", "there is no such dead letter (any more)"),
    ("POST /admin/v1/dead-letters/{id}/retry", 409, "consumer-gone", "its consumer joins.events no longer exists"),
    (
        "POST /admin/v1/dead-letters/{id}/retry",
        409,
        "same-id-parked",
        "another message with the same event id is parked; when it is processed or discarded, this one can be retried",
    ),
    ("POST /admin/v1/replays", 404, "consumer-not-found", "there is no consumer with this name"),
    (
        "POST /admin/v1/consumers/{name}/reset",
        409,
        "would-skip",
        "joins.events has not processed the last 4 messages of the log and would skip them",
    ),
    ("* /admin/v1/replays/{id}", 404, "replay-not-found", "there is no such replay"),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    let mut router = OpenApiRouter::new()
        .merge(log::router())
        .merge(consumers::router())
        .merge(parked::router())
        .merge(dead_letters::router())
        .merge(replays::router());
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// A change in the transaction of its request.
type Change<'t> = Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 't>>;

/// Makes a change once per identity, and answers with this status and no body.
async fn change(
    admin: &Administration,
    identity: Option<RequestIdentity>,
    status: StatusCode,
    change: impl for<'t> FnOnce(&'t mut PgConnection) -> Change<'t> + Send + 'static,
) -> Result<StoredResponse, Problem> {
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            change(tx).await?;
            Ok(StoredResponse::empty(status))
        })
    })
    .await
}
