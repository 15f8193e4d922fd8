//! Use cases. A flow called from a worker or a command opens its transactions; a flow called from a message handler
//! joins the handler's transaction, and a flow that changes an event joins that of its idempotent request.

pub(crate) mod counts;
pub(crate) mod event;
pub(crate) mod feed;
pub mod reconcile;
pub(crate) mod trending;

use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::Problem;
use mailbox::idempotency::{self, Effect, StoreResponse};
use sqlx::{Postgres, Transaction};

use crate::Events;

/// Runs `effect` in a transaction, once for each `Idempotency-Key`; a repeated request gets the stored response. Fails
/// if `effect` fails, or the key belongs to a different request.
pub(crate) async fn run_once<F>(
    events: &Events,
    identity: Option<&RequestIdentity>,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>) -> Effect<'t> + Send,
{
    idempotency::run_once(&events.db, identity, StoreResponse::WithBody, effect).await
}
