//! The dispatcher: sends hub messages to their subscribers, in order per lane, and saves the outcomes.
//!
//! Subscribers belong to shards, and one process at a time owns a shard. So the lanes, limits and breaker of a subscriber
//! are in the memory of one process, in its [`SubscriberQueue`]. A queue decides; the dispatcher performs the I/O for all
//! queues: it reads for them, sends their messages, and saves their changes in batches. No transaction is open while a
//! request is in flight.
//!
//! | part | responsibility |
//! |---|---|
//! | [`Ownership`] | which shards and subscribers this process owns |
//! | [`Reader`] | polls for new messages; the read in flight |
//! | [`Sender`] | the attempts in flight; [`slots`]: which subscriber may start the next one |
//! | [`Saver`] | the save in flight, and its retry |
//! | [`Scheduler`] | which queues have something to do, now or later |
//! | [`SubscriberQueue`] | all decisions about one subscriber |
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
//! messages and reads them from the database. Both paths end in [`SubscriberQueue::receive`], and two checks make them
//! equivalent:
//! - [`AnnouncedPosition`](reader::AnnouncedPosition), per dispatcher: a batch is handed over only if it starts where the
//!   previous announcement ended. With a gap it is ignored, and the next poll announces everything after the gap.
//! - `read_to` and `has_more`, per queue: a queue that has something left to read does not accept messages that are handed
//!   over, because they would overtake it. It reads them later. Numbers up to `read_to` are dropped as duplicates.

pub(crate) mod attempt;
mod ownership;
mod reader;
mod saver;
mod scheduler;
mod sender;
mod slots;
mod subscriber_queue;
mod webhook;

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use kit::clock::Clock;
use kit::secret::Cipher;
use kit::worker::Round;
use mailbox::consumers::ShardAssignment;
use mailbox::database::{Database, is_transient};
use sqlx::PgPool;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;

use self::ownership::Ownership;
use self::reader::Reader;
use self::saver::Saver;
use self::scheduler::{Activity, Scheduler};
use self::sender::Sender;
use self::subscriber_queue::SubscriberQueue;
use crate::attempt_totals::AttemptTotals;
use crate::directory_sync::DirectorySync;
use crate::hub_message::{DirectoryVersion, FannedBatch};
use crate::tenant_clients::TenantClients;

/// The pause after a database error before the next read, poll or save.
const DATABASE_RETRY_PAUSE: Duration = Duration::from_millis(200);

pub(crate) struct Dispatcher {
    db: PgPool,
    /// The time limit of one database step.
    step_time_max: Duration,
    clock: Clock,
    cipher: Cipher,
    queues: HashMap<Uuid, SubscriberQueue>,
    scheduler: Scheduler,
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
        Dispatcher {
            directory_changes: directory.subscribe(),
            directory,
            db: db.pool().clone(),
            step_time_max: db.step_time_max(),
            sender: Sender::new(clients, clock.clone(), in_flight_max),
            clock,
            cipher,
            queues: HashMap::new(),
            scheduler: Scheduler::default(),
            ownership: Ownership::new(assignment),
            reader: Reader::new(),
            saver: Saver::new(),
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
            Some(attempt) = self.sender.results.recv() => self.finish_attempt(attempt),
            Some(batch) = self.handed_over.recv() => self.hand_over(batch),
            read = finished(self.reader.read.as_mut().map(|(_, read)| read)) => self.finish_read(read)?,
            polled = finished(self.reader.poll.as_mut()) => self.finish_poll(polled)?,
            Ok(()) = self.directory_changes.changed() => self.notice_directory(),
            saved = finished(self.saver.in_flight.as_mut().map(|(_, save)| save)) => self.finish_save(saved)?,
            () = tokio::time::sleep_until(until) => {}
        }
        while let Ok(attempt) = self.sender.results.try_recv() {
            self.finish_attempt(attempt);
        }
        while let Ok(batch) = self.handed_over.try_recv() {
            self.hand_over(batch);
        }
        Ok(())
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        if self.sender.is_interrupted && self.saver.failed.is_none() && self.ownership.is_loaded() {
            return now;
        }
        let mut until = self.reader.next_poll().max(now + Duration::from_millis(1));
        if let Some(at) = self.scheduler.next_timer() {
            let pause = (at - self.clock.now()).to_std().unwrap_or_default();
            until = until.min(now + pause);
        }
        if self.saver.in_flight.is_none() && self.has_changes() {
            until = until.min(self.saver.next_save());
        }
        if let Some(due) = self.ownership.refresh_due() {
            until = until.min(due);
        }
        until.max(now)
    }

    /// Starts everything that can be started now: attempts, a save, a read, a poll.
    fn advance(&mut self) {
        let now = self.clock.now();
        self.scheduler.activate_due(now);
        let waits_for_database = self.retry_at.is_some_and(|at| at > Instant::now());
        if self.saver.failed.is_none() {
            self.send(now);
        }
        if !waits_for_database {
            self.start_save(now);
            self.start_read(now);
            self.reader.start_poll(&self.db);
        }
        self.deactivate_idle(now);
    }

    fn deactivate_idle(&mut self, now: DateTime<Utc>) {
        let queues = &self.queues;
        self.scheduler.deactivate_idle(now, |subscriber| {
            let queue = queues.get(subscriber)?;
            // The result of an attempt in flight activates the queue, and so does a free slot for a queue that waits for one:
            // rounds do not visit the many queues of slow subscribers.
            let is_active = queue.has_unsaved_outcomes() || queue.has_changes(now) || queue.needs_read();
            Some(Activity { wake_at: queue.next_wake(now), is_active })
        });
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
