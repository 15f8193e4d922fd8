//! Under `/admin/v1`. Every handler takes an [`kit::auth::Operator`]; what changes something in one transaction takes an
//! `Idempotency-Key`.

mod consumers;
mod dead_letters;
mod log;
mod parked;
mod replays;

use kit::idempotency::{Answer, Identity};
use kit::problem::Problem;
use mailbox::idempotency::{self, Effect, Keep};
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

/// Does it once for each `Idempotency-Key`.
async fn once<F>(app: &App, identity: Option<&Identity>, effect: F) -> Result<Answer, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    idempotency::once(&app.db, identity, Keep::Answer, app.clock.now(), effect).await
}

/// What a page's cursor belongs to: a list and its filters.
fn scope(list: &str, filters: &impl std::fmt::Debug) -> String {
    format!("{list}?{filters:?}")
}
