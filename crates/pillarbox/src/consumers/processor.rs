//! The interface between a shard worker and the code that processes messages.

use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use runtime::deadline;
use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

use super::lease_clock::Lease;
use super::leases;
use crate::database::{close_idle, no_response};
use crate::log::Message;

/// One message that is given to a processor.
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// The run: 0 for live processing and for a replay that repairs; a replay that repeats messages has its own number.
    pub run: i32,
    /// The message belongs to a replay and may have taken effect before.
    pub is_replayed: bool,
    pub(super) origin: Origin,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Origin {
    /// It was read from the log, live or by a replay.
    Log,
    /// It was parked before. `id` is the id of the parked row.
    Parked { id: i64, attempts: i32, discarded: bool },
}

impl Delivery {
    pub(super) fn live(message: Message) -> Delivery {
        Delivery { message, run: 0, is_replayed: false, origin: Origin::Log }
    }

    pub(super) fn replayed(message: Message, run: i32) -> Delivery {
        Delivery { message, run, is_replayed: true, origin: Origin::Log }
    }
}

/// The result of processing one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It has taken effect.
    Done,
    /// The message was published, but no queue is bound for it. The consumer passes it.
    Unrouted,
    /// It is retried later, or given up. The text says why.
    Failed(String),
    /// The message was not tried, because an earlier message of its key failed.
    Blocked,
}

/// The result of processing one batch.
pub struct BatchResult {
    /// One for each delivery, in the same order.
    pub outcomes: Vec<Outcome>,
    /// The transaction with the effects, if they are in this database. The outcomes are committed with it.
    pub tx: Option<Transaction<'static, Postgres>>,
}

/// Processes the messages of a consumer.
pub trait Processor: Send {
    /// Processes the deliveries in order. After an error, all deliveries of the batch are processed again.
    fn process(
        &mut self,
        context: &WorkerContext,
        deliveries: &[&Delivery],
    ) -> impl Future<Output = Result<BatchResult, ConsumerError>> + Send;

    /// When to call [`Processor::process_deferred`]. None if no work is deferred.
    fn deferred_due(&self) -> Option<Instant> {
        None
    }

    /// Processes a part of the work that [`Processor::process`] has deferred. Returns the transaction with the effects,
    /// which the worker fences and commits; None if nothing was left to do.
    fn process_deferred(
        &mut self,
        _context: &WorkerContext,
    ) -> impl Future<Output = Result<Option<Transaction<'static, Postgres>>, ConsumerError>> + Send {
        async { Ok(None) }
    }

    /// Called after the last batch, or part of the deferred work, was committed.
    fn committed(&mut self) {}

    /// Drops everything that was derived from the database and is not loaded for each batch: the database may have lost
    /// transactions, or another process may have taken over.
    fn reset(&mut self) {}

    /// Returns how many deliveries the next batch may have. A batch from several shards has at least one of each.
    fn batch_limit(&self) -> u32 {
        u32::MAX
    }
}

/// The shard worker that calls a processor.
#[derive(Clone)]
pub struct WorkerContext {
    /// The pool for background work.
    pub db: PgPool,
    /// The name of the consumer.
    pub consumer: String,
    /// The last batch could not be committed: process messages one by one, to find the one that fails.
    pub isolate_failures: bool,
    pub(super) owner: Uuid,
    /// The lease of the shards that the last rebalance returned.
    pub(super) lease: Lease,
    /// The time limit of one database step.
    pub(super) step_time_max: Duration,
}

/// Why a batch was not processed. The worker tries again.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say what they mean")]
pub enum ConsumerError {
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("lost the lease to another process")]
    LeaseLost,
    #[error("an operator dropped the consumer")]
    Dropped,
    #[error(
        "database-restored: this database was restored or copied; run `pillarbox recover --from TIME` or `pillarbox recover --skip`"
    )]
    Restored,
    #[error(
        "{0} is lapsed: it was too far behind, and retention no longer waits for it; run `pillarbox cursors reset {0}`"
    )]
    Lapsed(String),
    /// The state in memory may contain transactions that the database has lost.
    #[error("the database may have restarted; the batch is read again")]
    Invalidated,
    /// Nothing was processed: the next batch has at most as many messages as [`Processor::batch_limit`] says then.
    #[error("the batch is too large")]
    BatchTooLarge,
    #[error("{0}")]
    Processing(String),
}

impl WorkerContext {
    /// Whether no other process can own the shards now. A processor that acts outside of the database checks it at the last
    /// moment: the fence protects the database only.
    pub fn has_valid_lease(&self) -> bool {
        self.lease.is_valid()
    }

    /// Runs a database step with the time limit of background work. Without a response in time it fails like a lost
    /// connection.
    pub fn step<T>(
        &self,
        name: &str,
        work: impl Future<Output = Result<T, ConsumerError>>,
    ) -> impl Future<Output = Result<T, ConsumerError>> {
        // Not an `async fn`: see `deadline::within`.
        deadline::within(self.step_time_max, work).map(move |ended| match ended {
            Ok(result) => result,
            Err(expired) => {
                close_idle(&self.db);
                Err(no_response(&format!("{}: {name}", self.consumer), expired).into())
            }
        })
    }

    /// Prevents other processes from taking over until the transaction ends. Fails if one already has.
    pub(super) async fn lock(&self, tx: &mut Transaction<'_, Postgres>, durable: bool) -> Result<(), ConsumerError> {
        if leases::lock(tx, &self.consumer, self.owner, durable).await? {
            Ok(())
        } else {
            Err(ConsumerError::LeaseLost)
        }
    }
}
