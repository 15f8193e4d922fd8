//! The hub's use cases, one transaction each. A subscriber, event, message, stream or dead letter of another tenant is
//! not found.

pub(crate) mod catalogue_file;
pub(crate) mod dead_letter;
pub(crate) mod event;
pub(crate) mod event_type;
pub(crate) mod health;
pub(crate) mod pull;
pub(crate) mod replay;
pub(crate) mod stream;
pub(crate) mod subscriber;
pub(crate) mod verification;

use std::sync::Arc;

use kit::auth::Tenant;
use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::Problem;
use mailbox::idempotency::{self, Effect, StoreResponse};
use mailbox::log::Post;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::Hub;
use crate::error::Error;
use crate::operator_command::CommandRequest;

/// Runs `effect` in one transaction, once per `Idempotency-Key`. A repeated request gets the stored response.
async fn run_once<F>(
    hub: &Arc<Hub>,
    identity: Option<&RequestIdentity>,
    keep: StoreResponse,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>, Arc<Hub>) -> Effect<'t> + Send,
{
    let shared = Arc::clone(hub);
    idempotency::run_once(&hub.db, identity, keep, |tx| effect(tx, shared)).await
}

/// The log message that carries an operator command to fan-out.
fn command_post(tenant: &Tenant, key: Uuid, request: &CommandRequest) -> Result<Post, Error> {
    request.to_post(tenant, key).map_err(|error| sqlx::Error::Encode(error.into()).into())
}
