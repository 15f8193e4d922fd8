//! The loop of one process that works on some shards of one consumer.
//!
//! A round rebalances the shards if that is due (the heartbeat of the process extends its leases), then processes due
//! parked messages, the next messages of the log, and a chunk of a replay. The outcomes of a batch (done, parked, dead) are
//! committed in one transaction with the new positions. If a batch fails, none of them is saved, and the next round loads
//! its state from the database.

use std::sync::Arc;
use std::time::{Duration, Instant};

use runtime::clock::Clock;
use runtime::worker::Round;
use uuid::Uuid;

use super::commit::{commit, commit_deferred};
use super::consumer::{self, Consumer, ConsumerState};
use super::filter_changes::ReplayWait;
use super::local_handlers::LocalWorkerHandle;
use super::outcomes::Outcomes;
use super::owned_shards::OwnedShards;
use super::processor::{BatchResult, ConsumerError, Delivery, Origin, Outcome, Processor, WorkerContext};
use super::replay_reader::ReplayShard;
use super::replica::Replica;
use super::retry::RetryPolicy;
use super::{filter_changes, leases, parked_messages};
use crate::database::{Database, Incarnation, cluster_identity, is_connection_lost};
use crate::log::{Reader, Watcher};

/// How often positions are saved while no message matches.
const IDLE_SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// How many batches a worker that lags reads at once: the fixed cost of a batch matters then.
const BATCHES_WHEN_LAGGING: u32 = 10;

/// How a shard worker reads and retries.
#[derive(Debug, Clone, Copy)]
pub struct ShardWorkerOptions {
    /// How many messages are processed at a time; a multiple of it while the worker lags.
    pub batch: u32,
    /// How failed messages are retried.
    pub retry: RetryPolicy,
    /// One worker of all processes owns all shards and reads them in the order of the log; the others stand by.
    pub in_log_order: bool,
}

impl ShardWorkerOptions {
    fn reader(&self, consumer: &Consumer) -> Reader {
        let reader = Reader::new(consumer.filter.clone());
        if self.in_log_order { reader.in_log_order() } else { reader }
    }
}

/// Processes the messages of the shards that it leases.
pub struct ShardWorker<P> {
    context: WorkerContext,
    consumer: Consumer,
    options: ShardWorkerOptions,
    replica: Arc<Replica>,
    watcher: Watcher,
    clock: Clock,
    processor: P,
    shards: OwnedShards,
    /// The incarnation of the database in which the worker is registered. None: it has to register.
    registered_in: Option<Incarnation>,
    rebalanced_at: Option<Instant>,
    /// Still set at the start of a round if the last round panicked.
    is_in_round: bool,
    /// The watcher's count of invalidations when the shards were loaded.
    invalidations: u64,
    /// Set if requests of this process may wait for this worker.
    local: Option<LocalWorkerHandle>,
    replay_wait: ReplayWait,
}

impl<P: Processor> ShardWorker<P> {
    pub(super) fn new(
        db: &Database,
        consumer: Consumer,
        options: ShardWorkerOptions,
        replica: Arc<Replica>,
        watcher: Watcher,
        clock: Clock,
        processor: P,
    ) -> ShardWorker<P> {
        ShardWorker {
            context: WorkerContext {
                db: db.pool().clone(),
                consumer: consumer.name.clone(),
                isolate_failures: false,
                owner: Uuid::now_v7(),
                lease: replica.lease(),
                step_time_max: db.step_time_max(),
            },
            shards: OwnedShards::new(options.reader(&consumer)),
            consumer,
            options,
            replica,
            watcher,
            clock,
            processor,
            registered_in: None,
            rebalanced_at: None,
            is_in_round: false,
            invalidations: 0,
            local: None,
            replay_wait: ReplayWait::default(),
        }
    }

    pub(super) fn with_local_handle(self, local: Option<LocalWorkerHandle>) -> ShardWorker<P> {
        ShardWorker { local, ..self }
    }

    /// Runs one round. Returns `Busy` if there is more to do. Fails if the database fails, was restored or has lost
    /// transactions, if the consumer has lapsed, or if the processor fails; the batches before the failure are committed.
    /// A lost lease is not a failure: the next round joins again.
    pub(super) async fn round(&mut self) -> Result<Round, ConsumerError> {
        // The last round panicked. Its messages were read but not committed.
        if std::mem::replace(&mut self.is_in_round, true) {
            self.reset();
            self.context.isolate_failures = true;
        }
        if std::mem::replace(&mut self.invalidations, self.watcher.invalidations()) != self.invalidations {
            self.reset();
        }
        let result = self.try_round().await;
        self.is_in_round = false;
        let error = match result {
            Ok(round) => return Ok(round),
            Err(error) => error,
        };
        self.context.isolate_failures = true;
        if let ConsumerError::BatchTooLarge = error {
            self.reset_shards();
            return Ok(Round::Busy);
        }
        self.reset();
        match error {
            ConsumerError::LeaseLost => {
                tracing::warn!(
                    consumer = self.context.consumer,
                    "lost the lease, or was reset by an operator; rejoining"
                );
                self.registered_in = None;
                Ok(Round::Busy)
            }
            ConsumerError::Dropped => {
                tracing::info!(consumer = self.context.consumer, "an operator dropped the consumer; registering again");
                self.registered_in = None;
                Ok(Round::Busy)
            }
            ConsumerError::Database(error) => {
                // The database may have failed over, and the watcher's own connection may fail much later.
                if is_connection_lost(&error) {
                    self.watcher.drop_snapshot();
                }
                Err(error.into())
            }
            error => Err(error),
        }
    }

    /// Saves the positions and releases all shards, so that other processes can take over at once. Fails if the positions
    /// could not be saved, even if the shards are released, or if the database fails.
    pub(super) async fn release(&mut self) -> Result<(), ConsumerError> {
        if self.is_in_round {
            self.reset();
        }
        let saved = if self.shards.is_empty() { Ok(()) } else { self.process(Vec::new(), &[]).await };
        self.reset();
        let WorkerContext { db, consumer, owner, .. } = &self.context;
        let releasing = async { Ok(leases::remove(&mut *db.acquire().await?, consumer, *owner).await?) };
        self.context.step("release", releasing).await?;
        saved
    }

    async fn try_round(&mut self) -> Result<Round, ConsumerError> {
        if self.rebalanced_at.is_none_or(|at| at.elapsed() > self.replica.heartbeat_interval()) {
            let context = self.context.clone();
            context.step("rebalance", self.rebalance()).await?;
        }
        let more_parked = self.process_parked().await?;
        let more_live = self.process_live().await?;
        let more_replayed = self.process_replay().await?;
        let deferred_due = self.process_deferred().await?;
        if more_parked || more_replayed || more_live {
            return Ok(Round::Busy);
        }
        let save_due = self.save_skipped().await?;
        let next_due = deferred_due.into_iter().chain(save_due).min();
        Ok(match next_due.map(|due| due.saturating_duration_since(Instant::now())) {
            Some(Duration::ZERO) => Round::Busy,
            Some(pause) => Round::IdleFor(pause),
            None => Round::Idle,
        })
    }

    /// Drops all in-memory state. It may be stale; the next round loads it again from the database.
    fn reset(&mut self) {
        self.reset_shards();
        self.processor.reset();
    }

    fn reset_shards(&mut self) {
        self.shards.reset(self.options.reader(&self.consumer));
        self.rebalanced_at = None;
        self.publish_shards();
    }

    fn publish_shards(&self) {
        if let Some(local) = &self.local {
            local.set_shards(&self.shards.numbers());
        }
    }

    async fn rebalance(&mut self) -> Result<(), ConsumerError> {
        if self.registered_in.is_none() {
            self.register().await?;
        }
        let WorkerContext { db, consumer, owner, .. } = &self.context;
        let (mut db, lease) = (db.acquire().await?, self.replica.lease());
        if cluster_identity::is_restored(&mut db).await? {
            return Err(ConsumerError::Restored);
        }
        match consumer::state(&mut db, consumer).await? {
            None => return Err(ConsumerError::Dropped),
            Some(ConsumerState { is_lapsed: true, .. }) => return Err(ConsumerError::Lapsed(consumer.clone())),
            Some(ConsumerState { needs_replay: true, .. }) => {
                let filter = &self.consumer.filter;
                let waits_for = filter_changes::request_replays(&mut db, consumer, filter, &self.replica).await?;
                self.replay_wait.observe(consumer, waits_for.as_deref());
            }
            Some(_) => self.replay_wait.observe(consumer, None),
        }
        let undivided = self.options.in_log_order;
        let Some(owned) = leases::rebalance(&mut db, consumer, *owner, &self.replica, undivided).await? else {
            return Err(ConsumerError::LeaseLost);
        };
        self.shards.update(&mut db, consumer, owned).await?;
        (self.rebalanced_at, self.context.lease) = (Some(Instant::now()), lease);
        self.publish_shards();
        Ok(())
    }

    async fn register(&mut self) -> Result<(), ConsumerError> {
        let WorkerContext { db: pool, consumer, owner, .. } = &mut self.context;
        if cluster_identity::is_restored(&mut *pool.acquire().await?).await? {
            return Err(ConsumerError::Restored);
        }
        self.consumer.register(pool).await?;
        let (mut db, filter) = (pool.acquire().await?, Some(&self.consumer.filter));
        self.registered_in = Some(leases::join(&mut db, consumer, owner, &self.replica, filter).await?);
        Ok(())
    }

    /// Processes parked messages that are due. Returns whether more are due.
    async fn process_parked(&mut self) -> Result<bool, ConsumerError> {
        let now = self.clock.now();
        if self.shards.parked_due.is_none_or(|due| due > now) {
            return Ok(false);
        }
        let shards = self.shards.numbers();
        let WorkerContext { db, consumer, .. } = &self.context;
        let reading = async {
            let mut db = db.acquire().await?;
            Ok(parked_messages::due(&mut db, consumer, &shards, now, self.options.batch).await?)
        };
        let due = self.context.step("read parked messages", reading).await?;
        if !due.is_empty() {
            self.process(due, &[]).await?;
        }
        let WorkerContext { db, consumer, .. } = &self.context;
        let reading = async { Ok(parked_messages::next_due(&mut *db.acquire().await?, consumer, &shards).await?) };
        self.shards.parked_due = self.context.step("read parked messages", reading).await?;
        Ok(self.shards.parked_due.is_some_and(|due| due <= self.clock.now()))
    }

    /// Processes a chunk of the oldest replay. Returns whether there is more to replay.
    async fn process_replay(&mut self) -> Result<bool, ConsumerError> {
        let Some(oldest) = self.shards.replays.first().map(|shard| shard.replay) else { return Ok(false) };
        let (mut chunk, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.shards.replays).into_iter().partition(|shard| shard.replay == oldest);
        let limit = (self.options.batch.min(self.processor.batch_limit()) / chunk.len() as u32).max(1);
        let mut deliveries = Vec::new();
        for replay in &mut chunk {
            let Some(position) = self.shards.saved_position(replay.shard) else { continue };
            let reading = async {
                let mut db = self.context.db.acquire().await?;
                Ok(replay.read(&mut db, &self.consumer.filter, position, limit).await?)
            };
            let messages = self.context.step("read a replay", reading).await?;
            let run = replay.run;
            deliveries.extend(messages.into_iter().map(|message| Delivery::replayed(message, run)));
        }
        self.process(deliveries, &chunk).await?;
        self.shards.replays = chunk.into_iter().filter(|shard| !shard.done).chain(rest).collect();
        Ok(!self.shards.replays.is_empty())
    }

    /// Processes the next messages of the log. Returns whether there is more to read.
    async fn process_live(&mut self) -> Result<bool, ConsumerError> {
        let Some((now, windows)) = self.watcher.newest() else { return Ok(false) };
        if self.registered_in != Some(now.incarnation) {
            // The watcher or this worker is connected to the database as it was before a failover. Transactions of that
            // snapshot may be lost and their ids assigned again, so a position with it would skip messages.
            self.watcher.invalidate();
            self.registered_in = None;
            return Err(ConsumerError::Invalidated);
        }
        let batch = self.options.batch.min(self.processor.batch_limit());
        let reader = &mut self.shards.reader;
        let in_memory = windows.iter().find_map(|window| reader.read_window(window, batch));
        let messages = match in_memory {
            Some(messages) => messages,
            None => {
                let was_lagging = !reader.is_done();
                reader.open_windows(&now);
                if reader.is_done() {
                    return Ok(false);
                }
                let limit = if was_lagging { self.options.batch * BATCHES_WHEN_LAGGING } else { batch };
                let limit = limit.min(self.processor.batch_limit());
                let reading = async { Ok(reader.read(&mut *self.context.db.acquire().await?, limit).await?) };
                self.context.step("read the log", reading).await?
            }
        };
        if !messages.is_empty() || self.shards.saved_at.elapsed() > IDLE_SAVE_INTERVAL {
            self.process(messages.into_iter().map(Delivery::live).collect(), &[]).await?;
        }
        // Also after a window in memory: there may be more windows after it.
        let reader = &self.shards.reader;
        Ok(!reader.is_done() || !reader.has_reached(&now))
    }

    /// Saves that messages were read that do not match, if it is due. Returns when it is due. Otherwise they would count as
    /// unread until the next messages arrive.
    async fn save_skipped(&mut self) -> Result<Option<Instant>, ConsumerError> {
        // Without a snapshot of the same incarnation, the transactions that the positions have passed may be lost.
        let is_current = || self.watcher.newest().is_some_and(|(now, _)| self.registered_in == Some(now.incarnation));
        if !self.shards.has_unsaved_positions() || !is_current() {
            return Ok(None);
        }
        let due = self.shards.saved_at + IDLE_SAVE_INTERVAL;
        if due > Instant::now() {
            return Ok(Some(due));
        }
        self.process(Vec::new(), &[]).await.map(|()| None)
    }

    /// Processes a part of the work that the processor has deferred, if it is due. Returns when the next part is due.
    async fn process_deferred(&mut self) -> Result<Option<Instant>, ConsumerError> {
        // A worker that stands by owns no shards; the deferred work belongs to the owner.
        if self.shards.is_empty() {
            return Ok(None);
        }
        let due = self.processor.deferred_due();
        if due.is_none_or(|due| due > Instant::now()) {
            return Ok(due);
        }
        let processing = self.processor.process_deferred(&self.context);
        if let Some(tx) = self.context.step("process deferred work", processing).await? {
            self.context.step("commit deferred work", commit_deferred(&self.context, tx)).await?;
            self.processor.committed();
        }
        Ok(self.processor.deferred_due())
    }

    /// Processes the messages that are ready, and commits the outcomes, the positions and the progress of replays.
    async fn process(&mut self, deliveries: Vec<Delivery>, replays: &[ReplayShard]) -> Result<(), ConsumerError> {
        let ready: Vec<&Delivery> = deliveries.iter().filter(|delivery| self.shards.is_ready(delivery)).collect();
        let result = match ready.as_slice() {
            [] => BatchResult { outcomes: Vec::new(), tx: None },
            ready => self.processor.process(&self.context, ready).await?,
        };
        if result.outcomes.len() != ready.len() {
            return Err(ConsumerError::Processing(
                "the processor did not return an outcome for every message".to_owned(),
            ));
        }
        let mut results = result.outcomes.into_iter();
        let mut outcomes = Outcomes::new(&self.consumer, self.options.retry, self.clock.now());
        for delivery in &deliveries {
            let outcome = match delivery.origin {
                Origin::Parked { discarded: true, .. } => Some(Outcome::Done),
                _ if self.shards.is_ready(delivery) => results.next(),
                _ => Some(Outcome::Blocked),
            };
            outcomes.add(delivery, outcome.unwrap_or(Outcome::Blocked));
        }
        let positions = self.shards.unsaved_positions();

        // The database may have crashed since and lost the transactions of the new snapshot. Their ids are assigned
        // again, so a position with that snapshot would skip the messages of the new transactions. The commit is fenced by
        // the worker's row, which is lost in each such crash.
        let committing = commit(&self.context, result.tx, &outcomes, replays, &positions);
        // The database refuses positions that are ahead of it: it has restarted, and the watcher has not noticed.
        let is_ahead = |error: &ConsumerError| matches!(error, ConsumerError::Invalidated);
        let committed = self.context.step("commit", committing).await;
        let keys = committed.inspect_err(|error| {
            if is_ahead(error) {
                self.watcher.invalidate();
            }
        })?;

        self.processor.committed();
        self.context.isolate_failures = false;
        self.shards.apply(positions, keys, outcomes.next_due());
        outcomes.count();
        if let Some(local) = &self.local {
            local.processed(deliveries.iter().map(|delivery| delivery.message.message_id));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
