//! Runs commands: those of HTTP requests in a transaction of their own, those of messages in the handler's transaction.

use http::StatusCode;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use pillarbox::database::is_data_error;
use runtime::clock::Clock;
use service::batched_writes::{BatchedWrite, Decision, WriteError};
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

/// Executes the commands of HTTP requests, many in one transaction. Each request has its effect once; a repeated
/// request gets the stored response of the first.
pub(crate) struct RequestedCommands {
    pub(crate) clock: Clock,
}

impl BatchedWrite for RequestedCommands {
    type Request = CommandRequest;
    type State = CommandBatch;

    fn identity(request: &CommandRequest) -> Option<&RequestIdentity> {
        Some(&request.identity)
    }

    async fn load(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        requests: &[CommandRequest],
    ) -> Result<CommandBatch, WriteError> {
        let mut batch = CommandBatch::load(tx, &self.clock, requests.iter().map(|request| &request.command)).await?;
        batch.run_due_sweep();
        Ok(batch)
    }

    fn decide(&self, batch: &mut CommandBatch, request: &CommandRequest) -> Decision {
        let outcome = batch.apply(&request.command);
        let is_temporary = outcome.as_ref().is_err_and(Refused::is_temporary);
        let response = outcome.map(response_of).map_err(Problem::from);
        match is_temporary {
            // A repeat may succeed.
            true => Decision::NotStored(response),
            false => Decision::Stored(response),
        }
    }

    async fn save(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        batch: CommandBatch,
        _: &[&CommandRequest],
    ) -> Result<(), WriteError> {
        batch.save(tx).await.map_err(save_error)
    }

    fn committed(&self, requests: &[CommandRequest], _: &[&CommandRequest]) {
        metrics::counter!("pillarbox_joins_commands_total").increment(requests.len() as u64);
        metrics::histogram!("pillarbox_joins_batch_size").record(requests.len() as f64);
    }
}

/// A data error is caused by one of the commands; any other error concerns the whole batch.
fn save_error(error: Error) -> WriteError {
    match matches!(&error, Error::Database(cause) if is_data_error(cause)) {
        true => WriteError::Request(error.into()),
        false => WriteError::Batch(error.into()),
    }
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
