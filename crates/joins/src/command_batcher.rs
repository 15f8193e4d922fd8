//! Collects the commands of concurrent requests, of any number of events, into one transaction. Each request gets its
//! response after the commit.
//!
//! A process has several command batchers, and all commands of one event pass through the same one. So the commands of
//! an event run in the order of their arrival, and an event that is locked by another process delays only its own
//! batcher.

use std::sync::Arc;
use std::time::Duration;

use kit::batch::{BatchError, BatchHandler, Batcher, Limits};
use kit::clock::Clock;
use kit::idempotency::StoredResponse;
use kit::problem::Problem;
use mailbox::database::{Database, DedicatedConnection, is_data_error, problem};
use uuid::Uuid;

use crate::error::Error;
use crate::flow::commands::{CommandRequest, ExecuteError, execute_requests};

/// Command batchers per process.
const BATCHERS: usize = 4;
/// Attempts for a batch whose Idempotency-Keys are being claimed by another transaction.
const ATTEMPTS: u32 = 3;
/// At most 500 requests per batch and 5,000 waiting requests per batcher.
const LIMITS: Limits = Limits::new(500, 5_000);

/// All command batchers of a process.
#[derive(Clone)]
pub(crate) struct CommandBatchers(Arc<[Batcher<CommandBatcher>]>);

pub(crate) struct CommandBatcher {
    db: DedicatedConnection,
    clock: Clock,
}

impl CommandBatchers {
    /// Returns the batchers and the future that runs them. The future ends when the last clone of the batchers is
    /// dropped.
    pub(crate) fn new(db: &Database, clock: &Clock) -> (CommandBatchers, impl Future<Output = ()> + Send + use<>) {
        let batcher = || CommandBatcher { db: db.dedicated_connection(), clock: clock.clone() };
        let (batchers, loops): (Vec<_>, Vec<_>) = (0..BATCHERS).map(|_| Batcher::new(batcher(), LIMITS)).unzip();
        (CommandBatchers(batchers.into()), async { drop(futures_util::future::join_all(loops).await) })
    }

    /// Runs the command of one request and returns its response. Fails if the queue is full, the command is refused or
    /// the transaction fails.
    pub(crate) async fn submit(&self, request: CommandRequest) -> Result<StoredResponse, Problem> {
        match self.of_event(request.command.event_id).submit(request).await {
            Ok(response) => response,
            Err(refused) => Err(refused.into_problem(Problem::clone)),
        }
    }

    fn of_event(&self, event_id: Uuid) -> &Batcher<CommandBatcher> {
        // The low bytes of a UUID are random in every version.
        &self.0[(event_id.as_u128() % self.0.len() as u128) as usize]
    }
}

impl BatchHandler for CommandBatcher {
    type Item = CommandRequest;
    type Output = Result<StoredResponse, Problem>;
    type Error = Problem;

    async fn run(&self, requests: &[CommandRequest]) -> Result<Vec<Self::Output>, BatchError<Problem>> {
        for _ in 0..ATTEMPTS {
            let mut db = self.db.acquire().await.map_err(|error| BatchError::Whole(problem(&error)))?;
            let executed = execute_requests(&mut db, &self.clock, requests).await;
            db.release(&executed).await;
            match executed {
                Ok(responses) => {
                    metrics::counter!("pillarbox_joins_orders_total").increment(requests.len() as u64);
                    metrics::histogram!("pillarbox_joins_batch_size").record(requests.len() as f64);
                    return Ok(responses);
                }
                // The other transaction has committed by now, so the next attempt finds its stored response.
                Err(ExecuteError::KeyClaimed) => {}
                Err(ExecuteError::Save(error)) => return Err(save_failure(error)),
                Err(ExecuteError::Database(error)) => return Err(BatchError::Whole(problem(&error))),
            }
        }
        let detail = "another request with this Idempotency-Key is still running; retry after a second";
        Err(BatchError::Item(Problem::conflict("still-running", detail).retry_after(Duration::from_secs(1))))
    }
}

/// A data error is caused by one of the commands; any other error concerns the whole batch.
fn save_failure(error: Error) -> BatchError<Problem> {
    match matches!(&error, Error::Database(cause) if is_data_error(cause)) {
        true => BatchError::Item(error.into()),
        false => BatchError::Whole(error.into()),
    }
}
