//! Runs commands: those of HTTP requests in a transaction of their own, those of messages in the handler's transaction.

use http::StatusCode;
use kit::clock::Clock;
use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::Problem;
use mailbox::database::ConnectionGuard;
use mailbox::idempotency::{Responses, StoreError};
use sqlx::{Postgres, Transaction};

use super::command_batch::CommandBatch;
use crate::domain::{Command, Outcome, Refused};
use crate::error::Error;
use crate::view::{BanView, RegistrationView};

/// A command of an HTTP request, and the identity by which a repeated request is recognized.
#[derive(Debug)]
pub(crate) struct CommandRequest {
    pub(crate) command: Command,
    pub(crate) identity: RequestIdentity,
}

/// The reason why a transaction was rolled back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecuteError {
    #[error("another transaction has claimed one of the Idempotency-Keys")]
    KeyClaimed,
    /// Writing the changes failed. If it is a data error, one of the commands caused it.
    #[error("saving the changes failed: {0}")]
    Save(Error),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

/// Runs the commands of many requests in one transaction. Each request has its effect once; a repeated request gets the
/// stored response of the first. Returns one response for each request, in order.
pub(crate) async fn execute_requests(
    db: &mut ConnectionGuard<'_>,
    clock: &Clock,
    requests: &[CommandRequest],
) -> Result<Vec<Result<StoredResponse, Problem>>, ExecuteError> {
    let mut tx = db.begin().await?;
    let mut batch = CommandBatch::load(&mut tx, clock, requests.iter().map(|request| &request.command)).await?;
    batch.run_due_sweep();
    let now = batch.now();
    // Read the stored responses under the locks of the events. A repeat of a request that is still running waits for
    // the lock, and then finds the response.
    let mut stored = Responses::load(&mut tx, requests.iter().map(|request| &request.identity), now).await?;
    let mut responses = Vec::with_capacity(requests.len());
    for CommandRequest { command, identity } in requests {
        if let Some(repeated) = stored.find(identity) {
            responses.push(repeated);
            continue;
        }
        let outcome = batch.apply(command);
        let is_temporary = outcome.as_ref().is_err_and(Refused::is_temporary);
        let response = outcome.map(response_of).map_err(Problem::from);
        match &response {
            // Not stored: a retry with the same key may succeed.
            Err(_) if is_temporary => {}
            Ok(response) => stored.insert(identity, response),
            Err(problem) => stored.insert(identity, &StoredResponse::problem(problem)),
        }
        responses.push(response);
    }
    batch.save(&mut tx).await.map_err(ExecuteError::Save)?;
    stored.save(&mut tx, now).await.map_err(|error| match error {
        StoreError::KeyInUse => ExecuteError::KeyClaimed,
        StoreError::Database(error) => error.into(),
    })?;
    tx.commit().await?;
    Ok(responses)
}

/// Runs the commands one after the other in the caller's transaction. Fails if one of them is refused.
pub(crate) async fn execute(
    tx: &mut Transaction<'_, Postgres>,
    clock: &Clock,
    commands: &[Command],
) -> Result<(), Error> {
    let mut batch = CommandBatch::load(tx, clock, commands).await?;
    batch.run_due_sweep();
    for command in commands {
        batch.apply(command)?;
    }
    batch.save(tx).await
}

fn response_of(outcome: Outcome) -> StoredResponse {
    match outcome {
        Outcome::Joined(registration, position) => {
            StoredResponse::json(StatusCode::CREATED, &RegistrationView::new(registration, position.map(i64::from)))
        }
        Outcome::AlreadyJoined(registration) | Outcome::Canceled(registration) | Outcome::Kicked(registration) => {
            StoredResponse::json(StatusCode::OK, &RegistrationView::new(registration, None))
        }
        Outcome::Banned(ban) => StoredResponse::json(StatusCode::OK, &BanView::from(ban)),
        Outcome::Unbanned | Outcome::EventUpdated(_) | Outcome::Recounted(_) | Outcome::Swept => {
            StoredResponse::empty(StatusCode::NO_CONTENT)
        }
    }
}
