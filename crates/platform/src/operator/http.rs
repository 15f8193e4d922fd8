//! The operator's HTTP API, under `/admin/v1`. Every handler requires an [`kit::auth::Operator`]. A change that is one
//! transaction accepts an `Idempotency-Key`.

mod consumers;
mod dead_letters;
mod log;
mod parked;
mod replays;

use utoipa_axum::router::OpenApiRouter;

use crate::app::App;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";

pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(log::router())
        .merge(consumers::router())
        .merge(parked::router())
        .merge(dead_letters::router())
        .merge(replays::router())
}
