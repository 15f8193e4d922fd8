//! Collects the commands of concurrent requests, of any number of events, into one transaction. Each request gets its
//! response after the commit.
//!
//! A process has several command batchers, and all commands of one event pass through the same one. So the commands of
//! an event run in the order of their arrival, and an event that is locked by another process delays only its own
//! batcher.

use std::sync::Arc;

use http::StatusCode;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use pillarbox::database::{Database, is_data_error};
use runtime::batch::{Batcher, Limits};
use runtime::clock::Clock;
use service::batched_writes::{BatchedWrite, BatchedWriteHandler, Decision, WriteError};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::domain::{Command, Outcome, Refused};
use crate::error::Error;
use crate::flow::command_batch::CommandBatch;
use crate::view::{BanView, RegistrationView};

/// Command batchers per process.
const BATCHERS: usize = 4;
/// At most 500 requests per batch and 5,000 waiting requests per batcher.
const LIMITS: Limits = Limits::new(500, 5_000);

/// All command batchers of a process.
#[derive(Clone)]
pub(crate) struct CommandBatchers(Arc<[CommandBatcher]>);

type CommandBatcher = Batcher<BatchedWriteHandler<RequestedCommands>>;

impl CommandBatchers {
    /// Returns the batchers and the future that runs them. The future ends when the last clone of the batchers is
    /// dropped.
    pub(crate) fn new(db: &Database, clock: &Clock) -> (CommandBatchers, impl Future<Output = ()> + Send + use<>) {
        let commands = || RequestedCommands { clock: clock.clone() };
        let handler = || BatchedWriteHandler::new(db, commands());
        let (batchers, loops): (Vec<_>, Vec<_>) = (0..BATCHERS).map(|_| Batcher::new(handler(), LIMITS)).unzip();
        (CommandBatchers(batchers.into()), async { drop(futures_util::future::join_all(loops).await) })
    }

    /// Runs the command of one request and returns its response. Fails if the queue is full, the command is refused or
    /// the transaction fails.
    pub(crate) async fn submit(&self, request: CommandRequest) -> Result<StoredResponse, Problem> {
        match self.of_event(request.command.event_id).submit(request).await {
            Ok(response) => response,
            Err(error) => Err(Problem::of_batch(error, Problem::clone)),
        }
    }

    fn of_event(&self, event_id: Uuid) -> &CommandBatcher {
        // The low bytes of a UUID are random in every version.
        &self.0[(event_id.as_u128() % self.0.len() as u128) as usize]
    }
}

/// A command of an HTTP request, and the identity by which a repeated request is recognized.
#[derive(Debug)]
pub(crate) struct CommandRequest {
    pub(crate) command: Command,
    pub(crate) identity: RequestIdentity,
}

/// Executes the commands of HTTP requests, many in one transaction. Each request has its effect once; a repeated
/// request gets the stored response of the first.
struct RequestedCommands {
    clock: Clock,
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
        // A repeat of a request that failed for a temporary reason may succeed.
        if is_temporary { Decision::NotStored(response) } else { Decision::Stored(response) }
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
    if matches!(&error, Error::Database(cause) if is_data_error(cause)) {
        WriteError::Request(error.into())
    } else {
        WriteError::Batch(error.into())
    }
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
