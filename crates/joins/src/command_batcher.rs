//! Collects the commands of concurrent requests, of any number of events, into one transaction. Each request gets its
//! response after the commit.
//!
//! A process has several command batchers, and all commands of one event pass through the same one. So the commands of
//! an event run in the order of their arrival, and an event that is locked by another process delays only its own
//! batcher.

use std::sync::Arc;

use http_kit::idempotency::StoredResponse;
use http_kit::problem::Problem;
use pillarbox::database::Database;
use runtime::batch::{Batcher, Limits};
use runtime::clock::Clock;
use service::batched_writes::BatchedWriteHandler;
use uuid::Uuid;

use crate::flow::commands::{CommandRequest, RequestedCommands};

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
