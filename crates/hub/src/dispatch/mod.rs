//! The dispatcher: sends hub messages to their subscribers, in order per lane, and saves the outcomes.
//!
//! Subscribers belong to shards, and one process at a time owns a shard. So the lanes, limits and breaker of a subscriber
//! are in the memory of one process, in its [`SubscriberQueue`](subscriber_queue::SubscriberQueue). A queue decides; the dispatcher performs the I/O for all
//! queues: it reads for them, sends their messages, and saves their changes in batches. No transaction is open while a
//! request is in flight.
//!
//! | part | responsibility |
//! |---|---|
//! | [`Ownership`] | which shards this process owns, and which version of the directory it has applied |
//! | [`Reader`] | polls for new messages; the read in flight |
//! | [`Sender`] | the attempts in flight; [`slots`]: which subscriber may start the next one |
//! | [`Saver`] | the save in flight, and its retry |
//! | [`Queues`] | the subscriber queues, and which of them have something to do, now or later |
//! | [`SubscriberQueue`](subscriber_queue::SubscriberQueue) | all decisions about one subscriber |
//!
//! Each part owns its state. The dispatcher passes results from one to the other, and joins and leaves ([`lifecycle`]).
//!
//! # States of a hub message
//!
//! ```text
//!                     fan-out appends it with the next number
//!                                     |
//!          +------------------------> v <-------------------------------+
//!          |                      [stored]                              |
//!          |                          | receive, receive_lane           |
//!          |   its lane is unloaded   v                                 |
//!          +---- because the head --[queued]                            |
//!          |     failed               | start_next: head of its lane,   |
//!          |                          v and the limits allow            |
//!          |                     [in flight] -- crash or lost lease ----+
//!          |                          |
//!          |     retryable failure    |          2xx
//!          +-- [waiting] <------------+-------------------> [delivered]
//!          |   when due               |
//!          |                          | refused, 410, backoff exhausted,
//!          |                          v dead-letter command, content expired
//!          +---- operator retries --[dead]
//!                the head of a blocked lane
//! ```
//!
//! Queued messages and those in flight are in memory. The head of a waiting or blocked lane is unloaded with its lane, and
//! read again when the lane continues. `delivered` and `dead` are final outcomes, unless an operator retries the dead head
//! of a blocked lane. The retry of any other dead letter creates a new message.
//!
//! # States of a lane
//!
//! ```text
//!   (none) -- first message --> ATTACHED (ready or in flight) -- queue empty --> (none)
//!                                   |
//!                                   | the head fails or blocks, or more than 64 messages are queued
//!                                   v
//!                               DETACHED, in one of these states:
//!
//!   ready        the head may be sent     -- start_next ----------------> in flight
//!   in flight    the head is being sent   -- failed, is retried --------> waiting
//!                                         -- dead, subscriber blocks ---> blocked
//!                                         -- completed, more queued ----> ready
//!                                         -- completed, more stored ----> needs read
//!                                         -- completed, no more --------> (none), the row is deleted
//!   waiting      for its next attempt     -- due -----------------------> needs read
//!   needs read   nothing is in memory     -- start_lane_reads ----------> reading
//!   reading      a read is in flight      -- returned messages ---------> ready
//!                                         -- failed, or none but more --> needs read
//!                                         -- none, no more -------------> (none), the row is deleted
//!   blocked      the head is dead         -- operator command ----------> waiting, due at once
//! ```
//!
//! Invariants, checked by the random model test of the subscriber queue:
//! - At most one request of a lane is in flight, with its head. The next one follows when the head has a final outcome. Of a
//!   subscriber with batches, a request may have several messages, the first ones of each of its lanes.
//! - A lane is in at most one of the sets `ready`, `due` and `needs_read`, and in none while in flight or blocked.
//! - The subscriber's position stays before the first message of an attached lane without a final outcome. So every message
//!   up to the position has a final outcome, or belongs to a detached lane whose head is this message or an earlier one.
//! - The row of a lane is saved in the transaction of the first position that moves past the lane's messages, or earlier.
//! - A detached lane never becomes attached again: it ends when it has caught up, and its next message starts a new lane.
//! - After a crash, a message is sent again only if its attempt was in flight or its outcome was not saved.
//!
//! # Two paths for new messages
//!
//! Fan-out in the same process hands its messages over in memory: a new message is sent without being read from the
//! database. That path alone is not enough: fan-out may run in another process, the channel may be full, a queue may have
//! too many messages in memory, and after a start the backlog is in the database only. So the dispatcher also polls for new
//! messages and reads them from the database. Both paths end in `SubscriberQueue::receive`, and two checks make them
//! equivalent:
//! - `AnnouncedPosition`, per dispatcher: a batch is handed over only if it starts where the
//!   previous announcement ended. With a gap it is ignored, and the next poll announces everything after the gap.
//! - `read_to` and `has_more`, per queue: a queue that has something left to read does not accept messages that are handed
//!   over, because they would overtake it. It reads them later. Numbers up to `read_to` are dropped as duplicates.

mod changes;
mod lifecycle;
mod ownership;
mod queues;
mod reader;
mod reads;
mod reports;
mod saver;
mod scheduler;
mod send_permit;
mod sender;
mod slots;
mod store;
mod subscriber_queue;

use std::time::Duration;

use chrono::{DateTime, Utc};
use pillarbox::consumers::ShardAssignment;
use pillarbox::database::{Database, is_transient};
use runtime::clock::Clock;
use runtime::secret::Cipher;
use runtime::worker::Round;
use sqlx::PgPool;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use self::ownership::Ownership;
use self::queues::Queues;
use self::reader::{FinishedRead, Reader};
use self::saver::{Saved, Saver};
use self::sender::{FinishedAttempt, Sender};
use crate::deliveries::clients::TenantClients;
use crate::deliveries::message::FannedBatch;
use crate::directory::domain::DirectoryVersion;
use crate::directory::sync::DirectorySync;
use crate::health::totals::AttemptTotals;

/// The pause after a database error before the next read, poll or save.
const DATABASE_RETRY_PAUSE: Duration = Duration::from_millis(200);

pub(crate) struct Dispatcher {
    db: PgPool,
    /// The time limit of one database step.
    step_time_max: Duration,
    clock: Clock,
    cipher: Cipher,
    queues: Queues,
    ownership: Ownership,
    reader: Reader,
    sender: Sender,
    saver: Saver,
    totals: AttemptTotals,
    /// Batches of fan-out in this process.
    handed_over: mpsc::Receiver<FannedBatch>,
    directory: DirectorySync,
    /// Versions of the directory that requests of this process wait for.
    directory_changes: watch::Receiver<Option<DirectoryVersion>>,
    /// After a database error: when to try again.
    retry_at: Option<Instant>,
}

/// What reaches the dispatcher within its process.
pub(crate) struct LocalInput {
    pub(crate) handed_over: mpsc::Receiver<FannedBatch>,
    pub(crate) directory: DirectorySync,
    /// Where saved attempts are counted.
    pub(crate) totals: AttemptTotals,
}

/// What the dispatcher does after a part has processed a result.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Continue,
    /// The result belongs to another incarnation of the database.
    Rejoin,
}

impl Dispatcher {
    pub(crate) fn new(
        db: &Database,
        clock: Clock,
        clients: TenantClients,
        cipher: Cipher,
        assignment: ShardAssignment,
        LocalInput { handed_over, directory, totals }: LocalInput,
        in_flight_max: usize,
    ) -> Dispatcher {
        let (pool, step_time_max) = (db.pool().clone(), db.step_time_max());
        Dispatcher {
            directory_changes: directory.subscribe(),
            directory,
            reader: Reader::new(pool.clone(), step_time_max),
            saver: Saver::new(pool.clone(), step_time_max),
            sender: Sender::new(clients, clock.clone(), in_flight_max),
            db: pool,
            step_time_max,
            clock,
            cipher,
            queues: Queues::default(),
            ownership: Ownership::new(assignment),
            totals,
            handed_over,
            retry_at: None,
        }
    }

    /// Waits until something happens, and reacts to it. Fails with the error of the database, after which the next call
    /// continues.
    pub(crate) async fn round(&mut self) -> Result<Round, DispatchError> {
        let result = self.try_round().await;
        if let Err(error) = &result {
            self.ownership.report_error(error);
        }
        result
    }

    async fn try_round(&mut self) -> Result<Round, DispatchError> {
        // Hub messages and outcomes are committed without waiting for the disk, and a standby may lack them. After a crash
        // or a failover of the database, a number that the dispatcher knows may be that of another message.
        if self.ownership.consume_invalidation() {
            self.reset();
        }
        if self.ownership.is_rebalance_due() && self.saver.is_idle() {
            self.flush().await?;
            self.rebalance().await?;
        } else if self.ownership.refresh_due().is_some_and(|due| due <= Instant::now()) {
            self.refresh().await?;
        }
        self.wait().await?;
        // Nothing is sent until the dispatcher knows which subscribers it owns.
        if self.ownership.is_loaded() {
            self.advance();
        }
        Ok(Round::Busy)
    }

    /// Waits for the next result, batch or timer, and applies all that have arrived.
    async fn wait(&mut self) -> Result<(), DispatchError> {
        let until = self.next_wake();
        tokio::select! {
            Some(attempt) = self.sender.finished() => self.finish_attempt(attempt),
            Some(batch) = self.handed_over.recv() => self.hand_over(batch),
            read = self.reader.finished() => self.finish_read(read)?,
            Ok(()) = self.directory_changes.changed() => self.notice_directory(),
            saved = self.saver.finished() => self.finish_save(saved)?,
            () = tokio::time::sleep_until(until) => {}
        }
        while let Some(attempt) = self.sender.try_finished() {
            self.finish_attempt(attempt);
        }
        while let Ok(batch) = self.handed_over.try_recv() {
            self.hand_over(batch);
        }
        Ok(())
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        if self.sender.is_interrupted() && !self.saver.has_failed() && self.ownership.is_loaded() {
            return now;
        }
        let mut until = self.reader.next_poll().max(now + Duration::from_millis(1));
        if let Some(at) = self.queues.next_timer() {
            let pause = (at - self.clock.now()).to_std().unwrap_or_default();
            until = until.min(now + pause);
        }
        if let Some(next_save) = self.saver.next_save()
            && self.has_changes()
        {
            until = until.min(next_save);
        }
        if let Some(due) = self.ownership.refresh_due() {
            until = until.min(due);
        }
        until.max(now)
    }

    /// Starts everything that can be started now: attempts, a save, a read, a poll.
    fn advance(&mut self) {
        let now = self.clock.now();
        self.queues.activate_due(now);
        let waits_for_database = self.retry_at.is_some_and(|at| at > Instant::now());
        if !self.saver.has_failed() {
            self.send(now);
        }
        if !waits_for_database {
            // Before a rebalance only a failed save is started again: the rebalance saves all changes itself.
            if self.saver.has_failed() || !self.ownership.is_rebalance_due() {
                self.saver.start_due(self.ownership.fence(), &mut self.queues, now);
            }
            self.reader.start_read(&mut self.queues, now);
            self.reader.start_poll();
        }
        self.queues.deactivate_idle(now);
    }

    /// Starts attempts, unless the lease may have expired: another process may send the same messages then. The next
    /// rebalance finds out.
    fn send(&mut self, now: DateTime<Utc>) {
        if let Some(lease) = self.ownership.valid_lease() {
            self.sender.send(&mut self.queues, &lease, now);
        }
    }

    fn finish_attempt(&mut self, attempt: FinishedAttempt) {
        self.sender.finish_attempt(attempt, &mut self.queues, self.clock.now());
    }

    /// Accepts a batch of fan-out in this process.
    fn hand_over(&mut self, batch: FannedBatch) {
        // A batch from before a failover must not follow on numbers from after it, although they may be contiguous: the
        // messages that have these numbers now would never be announced.
        let version = batch.directory_version;
        let is_valid = self.ownership.is_loaded() && self.ownership.is_of(version.incarnation);
        if is_valid && self.reader.hand_over(batch, &mut self.queues) {
            self.ownership.notice_version(version);
        }
    }

    fn finish_read(&mut self, finished: FinishedRead) -> Result<(), DispatchError> {
        let next = match finished {
            FinishedRead::Poll(polled) => self.reader.finish_poll(polled, &mut self.ownership, &mut self.queues),
            FinishedRead::Read(read) => {
                self.reader.finish_read(read, &self.ownership, &mut self.queues, self.clock.now())
            }
        };
        match next {
            Ok(Next::Continue) => Ok(()),
            Ok(Next::Rejoin) => {
                self.rejoin();
                Ok(())
            }
            Err(error) => {
                self.retry_at = Some(Instant::now() + DATABASE_RETRY_PAUSE);
                Err(error)
            }
        }
    }

    fn finish_save(&mut self, saved: TaskResult<bool>) -> Result<(), DispatchError> {
        match self.saver.finish(saved) {
            Ok(Some(Saved::All(changes))) => self.totals.record(&changes.attempts),
            Ok(Some(Saved::LeaseLost)) => self.lose_lease(),
            Ok(None) => {}
            Err(error) if error.is_transient() => {
                self.retry_at = Some(Instant::now() + DATABASE_RETRY_PAUSE);
                return Err(error);
            }
            // The database would refuse this save every time. The messages are sent again.
            Err(error) => {
                self.reset();
                return Err(error);
            }
        }
        Ok(())
    }

    /// A request of this process has changed a subscriber.
    fn notice_directory(&mut self) {
        let version = *self.directory_changes.borrow_and_update();
        if let Some(version) = version.filter(|version| self.ownership.is_of(version.incarnation)) {
            self.ownership.notice_version(version);
        }
    }

    /// Saves all changes and waits for the result: the next owner of a shard must find the outcomes of its messages.
    async fn flush(&mut self) -> Result<(), DispatchError> {
        if self.has_changes() {
            self.saver.start_all(self.ownership.fence(), &mut self.queues, self.clock.now());
        }
        if self.saver.is_saving() {
            let saved = self.saver.finished().await;
            self.finish_save(saved)?;
        }
        Ok(())
    }

    fn has_changes(&self) -> bool {
        self.queues.count_changed(self.clock.now(), 1) > 0
    }
}

/// The result of a task that accesses the database.
type TaskResult<T> = Result<sqlx::Result<T>, tokio::task::JoinError>;

fn flatten<T>(result: TaskResult<T>) -> Result<T, DispatchError> {
    Ok(result??)
}

/// Waits for the task. Never returns if there is none.
async fn finished<T>(task: Option<&mut JoinHandle<T>>) -> Result<T, tokio::task::JoinError> {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DispatchError {
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("{0}")]
    Task(#[from] tokio::task::JoinError),
    #[error("the subscribers cannot be loaded: {0}")]
    Directory(String),
    #[error(
        "database-restored: this database was restored or copied, so nothing is sent; continue with `pillarbox recover --from TIME` or `pillarbox recover --skip`"
    )]
    Restored,
}

impl DispatchError {
    /// Whether the same operation may succeed later.
    fn is_transient(&self) -> bool {
        match self {
            DispatchError::Database(error) => is_transient(error),
            DispatchError::Task(_) => false,
            DispatchError::Directory(_) | DispatchError::Restored => true,
        }
    }
}

#[cfg(test)]
mod tests;
