//! Reading: polls for new messages, and reads messages and commands for the subscriber queues.
//!
//! At most one poll and one read are in flight at a time; each serves many subscribers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use mailbox::database::{SHORT_STEP_TIME_MAX, step};
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::subscriber_queue::{Origin, SubscriberQueue};
use super::{DATABASE_RETRY_PAUSE, DispatchError, Dispatcher, TaskResult, flatten};
use crate::delivery::{NewMessages, ReadRequest, ReadResult};
use crate::hub_message::FannedBatch;
use crate::store::delivery_reads;

/// The pause between two polls for new messages while there are some.
const POLL_PAUSE: Duration = Duration::from_millis(20);
/// The pause between two polls after [`IDLE_AFTER`] without new messages.
const IDLE_POLL_PAUSE: Duration = Duration::from_millis(100);
const IDLE_AFTER: Duration = Duration::from_secs(2);
/// Bounds each part of one read: the subscribers whose messages are read, the detached lanes of all subscribers, and the
/// subscribers whose commands are read.
const READS_MAX: usize = 64;
/// Bounds the detached lanes of one subscriber in one read.
const LANE_READS_MAX: usize = 8;
/// Bounds the subscribers of one tenant in one read while others need one, too.
const TENANT_READS_MAX: usize = 32;

pub(super) struct Reader {
    pub(super) announced: AnnouncedPosition,
    /// When the announced position advanced for the last time.
    advanced_at: Instant,
    polled_at: Instant,
    pub(super) poll: Option<JoinHandle<sqlx::Result<NewMessages>>>,
    pub(super) read: Option<(ReadRequest, JoinHandle<sqlx::Result<ReadResult>>)>,
}

/// The number up to which all messages were announced to the subscriber queues: handed over, or marked as to be read. None
/// if it has not been loaded yet.
///
/// It guarantees that no message is missed although messages come on two paths: a batch is handed over only if it starts
/// where the announced position ends, and a poll covers everything after it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnnouncedPosition(Option<i64>);

impl AnnouncedPosition {
    pub(super) fn is_known(self) -> bool {
        self.0.is_some()
    }

    pub(super) fn load(&mut self, newest: i64) {
        self.0 = Some(newest);
    }

    /// Advances to the end of a batch that fan-out hands over. Returns false if there is a gap between the announced position
    /// and the batch, or an overlap; the next poll covers the batch then.
    fn advance_contiguously(&mut self, after: i64, to: i64) -> bool {
        let is_contiguous = self.0 == Some(after);
        if is_contiguous {
            self.0 = Some(to);
        }
        is_contiguous
    }

    /// Advances to the newest number that a poll found. Returns false if it was announced before.
    fn advance_to(&mut self, newest: i64) -> bool {
        let is_new = self.0.is_none_or(|announced| newest > announced);
        if is_new {
            self.0 = Some(newest);
        }
        is_new
    }
}

impl Reader {
    pub(super) fn new() -> Reader {
        let now = Instant::now();
        Reader { announced: AnnouncedPosition::default(), advanced_at: now, polled_at: now, poll: None, read: None }
    }

    pub(super) fn reset(&mut self) {
        (self.announced, self.poll, self.read) = (AnnouncedPosition::default(), None, None);
    }

    pub(super) fn next_poll(&self) -> Instant {
        let pause = if self.advanced_at.elapsed() > IDLE_AFTER { IDLE_POLL_PAUSE } else { POLL_PAUSE };
        self.advanced_at.max(self.polled_at) + pause
    }

    /// Starts a poll if one is due.
    pub(super) fn start_poll(&mut self, db: &PgPool) {
        let Some(after) = self.announced.0 else { return };
        if self.poll.is_some() || Instant::now() < self.next_poll() {
            return;
        }
        self.polled_at = Instant::now();
        let db = db.clone();
        self.poll = Some(tokio::spawn(async move {
            let polling = async { delivery_reads::poll(&mut *db.acquire().await?, after).await };
            step(&db, "poll", SHORT_STEP_TIME_MAX, polling).await
        }));
    }

    fn start_read(&mut self, db: &PgPool, time_max: Duration, request: ReadRequest) {
        let (db, requested) = (db.clone(), request.clone());
        let read = tokio::spawn(async move {
            let reading = async { delivery_reads::read(&mut *db.acquire().await?, &requested).await };
            step(&db, "read messages", time_max, reading).await
        });
        self.read = Some((request, read));
    }
}

impl Dispatcher {
    /// Passes the messages of a fan-out batch in this process to their subscriber queues, if they follow directly on
    /// the announced position.
    pub(super) fn hand_over(&mut self, batch: FannedBatch) {
        // A batch from before a failover must not follow on numbers from after it, although they may be contiguous: the
        // messages that have these numbers now would never be announced.
        let is_valid = self.ownership.is_loaded() && self.ownership.is_of(batch.directory_version.incarnation);
        if !is_valid || !self.reader.announced.advance_contiguously(batch.after, batch.to) {
            // Not loaded yet, a gap before the batch, or an overlap with it: the next poll announces the messages.
            return;
        }
        self.reader.advanced_at = Instant::now();
        self.ownership.notice_version(batch.directory_version);
        for (subscriber, messages) in batch.messages {
            // Without a queue, the subscriber belongs to another process, or is new: then its queue reads for itself once
            // the dispatcher has loaded the subscriber.
            if let Some(queue) = self.queues.get_mut(&subscriber) {
                queue.receive(messages, Origin::HandedOver);
                // A paused queue has nothing to do, and a round visits every active one.
                if queue.may_send() {
                    self.scheduler.activate(subscriber);
                }
            }
        }
    }

    /// Tells the subscriber queues that a poll found something for them in the database.
    pub(super) fn finish_poll(&mut self, polled: TaskResult<NewMessages>) -> Result<(), DispatchError> {
        self.reader.poll = None;
        let new = flatten(polled).inspect_err(|_| self.retry_at = Some(Instant::now() + DATABASE_RETRY_PAUSE))?;
        if !self.ownership.is_of(new.directory_version.incarnation) {
            self.rejoin();
            return Ok(());
        }
        self.ownership.notice_version(new.directory_version);
        if self.reader.announced.advance_to(new.newest) {
            self.reader.advanced_at = Instant::now();
            for subscriber in new.subscribers {
                if let Some(queue) = self.queues.get_mut(&subscriber) {
                    let has_commands = new.commanded.contains(&subscriber);
                    queue.mark_has_more();
                    if has_commands {
                        queue.mark_has_commands();
                    }
                    if has_commands || queue.may_send() {
                        self.scheduler.activate(subscriber);
                    }
                }
            }
        }
        Ok(())
    }

    /// Starts a read for the active subscriber queues that need one, unless a read is in flight.
    pub(super) fn start_read(&mut self, now: DateTime<Utc>) {
        if self.reader.read.is_some() {
            return;
        }
        let (mut request, mut by_tenant, mut beyond_share) =
            (ReadRequest::default(), HashMap::<Arc<str>, usize>::new(), Vec::new());
        for subscriber in self.scheduler.next_turn() {
            if is_full(&request) {
                break;
            }
            let Some(queue) = self.queues.get_mut(subscriber) else { continue };
            let tenant = &queue.recipient.tenant;
            if by_tenant.get(tenant).is_some_and(|reads| *reads >= TENANT_READS_MAX) {
                beyond_share.push(*subscriber);
            } else if add_reads(&mut request, queue, now) {
                *by_tenant.entry(queue.recipient.tenant.clone()).or_default() += 1;
            }
        }
        for subscriber in beyond_share {
            if let Some(queue) = self.queues.get_mut(&subscriber).filter(|_| !is_full(&request)) {
                add_reads(&mut request, queue, now);
            }
        }
        if !request.is_empty() {
            self.reader.start_read(&self.db, self.step_time_max, request);
        }
    }

    /// Passes what was read to the subscriber queues. If the read failed, they request it again.
    pub(super) fn finish_read(&mut self, read: TaskResult<ReadResult>) -> Result<(), DispatchError> {
        let Some((request, _)) = self.reader.read.take() else { return Ok(()) };
        match flatten(read) {
            Ok(ReadResult { incarnation: Some(incarnation), .. }) if !self.ownership.is_of(Some(incarnation)) => {
                self.rejoin();
                Ok(())
            }
            Ok(result) => {
                self.receive_read(request, result);
                Ok(())
            }
            Err(error) => {
                self.fail_read(request);
                self.retry_at = Some(Instant::now() + DATABASE_RETRY_PAUSE);
                Err(error)
            }
        }
    }

    fn receive_read(&mut self, request: ReadRequest, mut result: ReadResult) {
        let now = self.clock.now();
        for read in request.queues {
            let messages = result.queues.remove(&read.subscriber).unwrap_or_default();
            if let Some(queue) = self.queues.get_mut(&read.subscriber) {
                let is_complete = messages.len() < read.limit;
                queue.receive(messages, Origin::Read { is_complete });
                self.scheduler.activate(read.subscriber);
            }
        }
        for (subscriber, read) in request.lanes {
            let messages = result.lanes.remove(&(subscriber, read.key.clone())).unwrap_or_default();
            if let Some(queue) = self.queues.get_mut(&subscriber) {
                queue.receive_lane(&read, messages);
                self.scheduler.activate(subscriber);
            }
        }
        for (subscriber, command) in result.commands {
            if let Some(queue) = self.queues.get_mut(&subscriber) {
                queue.execute(command, now);
                self.scheduler.activate(subscriber);
            }
        }
    }

    fn fail_read(&mut self, request: ReadRequest) {
        for read in request.queues {
            if let Some(queue) = self.queues.get_mut(&read.subscriber) {
                queue.fail_read();
            }
        }
        for (subscriber, read) in request.lanes {
            if let Some(queue) = self.queues.get_mut(&subscriber) {
                queue.fail_lane_read(read);
            }
        }
        for subscriber in request.commands {
            if let Some(queue) = self.queues.get_mut(&subscriber) {
                queue.mark_has_commands();
            }
        }
    }
}

/// Whether one of the parts of a read has reached its bound.
fn is_full(request: &ReadRequest) -> bool {
    request.queues.len().max(request.lanes.len()).max(request.commands.len()) >= READS_MAX
}

/// Adds what the queue has to read, and marks it as being read. Returns false if it has nothing to read.
fn add_reads(request: &mut ReadRequest, queue: &mut SubscriberQueue, now: DateTime<Utc>) -> bool {
    let (subscriber, has_commands, read) = (queue.recipient.id, queue.start_command_read(), queue.start_read());
    let lanes = queue.start_lane_reads(now, LANE_READS_MAX.min(READS_MAX - request.lanes.len()));
    let has_reads = has_commands || read.is_some() || !lanes.is_empty();
    request.commands.extend(has_commands.then_some(subscriber));
    request.queues.extend(read);
    request.lanes.extend(lanes.into_iter().map(|lane| (subscriber, lane)));
    has_reads
}

#[cfg(test)]
impl AnnouncedPosition {
    pub(super) fn of(n: i64) -> AnnouncedPosition {
        AnnouncedPosition(Some(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_handed_over_only_without_a_gap_before_it() {
        let mut announced = AnnouncedPosition::default();
        assert!(!announced.advance_contiguously(0, 5), "not before the position is loaded");
        announced.load(10);
        assert!(announced.advance_contiguously(10, 12));
        assert!(!announced.advance_contiguously(15, 20), "13 to 15 are missing");
        assert!(!announced.advance_contiguously(10, 12), "announced before");
        assert_eq!(announced, AnnouncedPosition(Some(12)), "a refused batch changes nothing");
        assert!(announced.advance_contiguously(12, 12), "a batch without messages");
    }

    #[test]
    fn a_poll_closes_a_gap_and_is_followed_by_the_next_batch() {
        let mut announced = AnnouncedPosition(Some(12));
        assert!(announced.advance_to(20), "it covers the batch that was refused");
        assert!(!announced.advance_to(20) && !announced.advance_to(7), "a poll that started earlier ends later");
        assert!(announced.advance_contiguously(20, 21));
    }
}
