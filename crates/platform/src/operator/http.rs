//! The operator's HTTP API, under `/admin/v1`. Every handler requires an [`kit::auth::Operator`]. A change that is one
//! transaction accepts an `Idempotency-Key`.

mod consumers;
mod dead_letters;
mod log;
mod parked;
mod replays;

use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::Problem;
use mailbox::idempotency::{self, Effect, StoreResponse};
use sqlx::{Postgres, Transaction};
use utoipa_axum::router::OpenApiRouter;

use crate::app::App;

pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(log::router())
        .merge(consumers::router())
        .merge(parked::router())
        .merge(dead_letters::router())
        .merge(replays::router())
}

/// Runs `effect` in a transaction, once for each `Idempotency-Key`; a repeated request gets the stored response.
async fn run_once<F>(app: &App, identity: Option<&RequestIdentity>, effect: F) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    idempotency::run_once(&app.db, identity, StoreResponse::WithBody, app.clock.now(), effect).await
}
