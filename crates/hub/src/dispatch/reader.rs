//! Reading: polls for new messages, and reads messages and commands for the subscriber queues.
//!
//! At most one poll and one read are in flight at a time; each serves many subscribers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use pillarbox::database::{SHORT_STEP_TIME_MAX, step};
use sqlx::{PgConnection, PgPool};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::ownership::Ownership;
use super::queues::Queues;
use super::reads::{NewMessages, ReadRequest, ReadResult};
use super::subscriber_queue::{Origin, SubscriberQueue};
use super::{DispatchError, Next, TaskResult, finished, flatten, store};
use crate::deliveries::message::FannedBatch;

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
/// Bounds the subscribers of one tenant in one read while others also need one.
const TENANT_READS_MAX: usize = 32;

pub(super) struct Reader {
    db: PgPool,
    /// The time limit of one read.
    step_time_max: Duration,
    announced: AnnouncedPosition,
    /// When the announced position advanced for the last time.
    advanced_at: Instant,
    polled_at: Instant,
    poll: Option<JoinHandle<sqlx::Result<NewMessages>>>,
    read: Option<(ReadRequest, JoinHandle<sqlx::Result<ReadResult>>)>,
}

/// What has ended: a poll or a read.
pub(super) enum FinishedRead {
    Poll(TaskResult<NewMessages>),
    Read(TaskResult<ReadResult>),
}

/// The number up to which all messages were announced to the subscriber queues: handed over, or marked as to be read. None
/// if it has not been loaded yet.
///
/// It guarantees that no message is missed although messages come on two paths: a batch is handed over only if it starts
/// where the announced position ends, and a poll covers everything after it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct AnnouncedPosition(Option<i64>);

impl AnnouncedPosition {
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
    pub(super) fn new(db: PgPool, step_time_max: Duration) -> Reader {
        let now = Instant::now();
        let announced = AnnouncedPosition::default();
        Reader { db, step_time_max, announced, advanced_at: now, polled_at: now, poll: None, read: None }
    }

    pub(super) fn reset(&mut self) {
        (self.announced, self.poll, self.read) = (AnnouncedPosition::default(), None, None);
    }

    pub(super) fn next_poll(&self) -> Instant {
        let pause = if self.advanced_at.elapsed() > IDLE_AFTER { IDLE_POLL_PAUSE } else { POLL_PAUSE };
        self.advanced_at.max(self.polled_at) + pause
    }

    /// Loads the announced position, unless it is known. Called before the positions of new queues are read, so that everything
    /// after it is announced to them.
    pub(super) async fn load_position(&mut self, db: &mut PgConnection) -> sqlx::Result<()> {
        if self.announced.0.is_none() {
            self.announced = AnnouncedPosition(Some(store::reads::newest_number(db).await?));
        }
        Ok(())
    }

    /// Passes the messages of a fan-out batch in this process to their subscriber queues, if they follow directly on the
    /// announced position. If there is a gap before the batch, or an overlap with it, the next poll announces the messages.
    /// Returns whether the messages were passed.
    pub(super) fn hand_over(&mut self, batch: FannedBatch, queues: &mut Queues) -> bool {
        if !self.announced.advance_contiguously(batch.after, batch.to) {
            return false;
        }
        self.advanced_at = Instant::now();
        for (subscriber, messages) in batch.messages {
            // Without a queue, the subscriber belongs to another process, or is new: then its queue reads for itself once
            // the dispatcher has loaded the subscriber.
            if let Some(queue) = queues.get_mut(subscriber) {
                queue.receive(messages, Origin::HandedOver);
                // A paused queue has nothing to do, and a round visits every active one.
                if queue.may_send() {
                    queues.activate(subscriber);
                }
            }
        }
        true
    }

    /// Starts a poll if one is due.
    pub(super) fn start_poll(&mut self) {
        let Some(after) = self.announced.0 else { return };
        if self.poll.is_some() || Instant::now() < self.next_poll() {
            return;
        }
        self.polled_at = Instant::now();
        let db = self.db.clone();
        self.poll = Some(tokio::spawn(async move {
            let polling = async { store::reads::poll(&mut *db.acquire().await?, after).await };
            step(&db, "poll", SHORT_STEP_TIME_MAX, polling).await
        }));
    }

    /// Starts a read for the active subscriber queues that need one, unless a read is in flight.
    pub(super) fn start_read(&mut self, queues: &mut Queues, now: DateTime<Utc>) {
        if self.read.is_some() {
            return;
        }
        let (mut request, mut by_tenant, mut beyond_share) =
            (ReadRequest::default(), HashMap::<Arc<str>, usize>::new(), Vec::new());
        queues.visit_in_turn(|queue| {
            if is_full(&request) {
                return false;
            }
            let tenant = &queue.recipient.tenant;
            if by_tenant.get(tenant).is_some_and(|reads| *reads >= TENANT_READS_MAX) {
                beyond_share.push(queue.recipient.id);
            } else if add_reads(&mut request, queue, now) {
                *by_tenant.entry(queue.recipient.tenant.clone()).or_default() += 1;
            }
            true
        });
        for subscriber in beyond_share {
            if let Some(queue) = queues.get_mut(subscriber).filter(|_| !is_full(&request)) {
                add_reads(&mut request, queue, now);
            }
        }
        if request.is_empty() {
            return;
        }
        let (db, time_max, requested) = (self.db.clone(), self.step_time_max, request.clone());
        let read = tokio::spawn(async move {
            let reading = async { store::reads::read(&mut *db.acquire().await?, &requested).await };
            step(&db, "read messages", time_max, reading).await
        });
        self.read = Some((request, read));
    }

    /// Waits until the poll or the read in flight ends. Never returns if there is none.
    pub(super) async fn finished(&mut self) -> FinishedRead {
        let Reader { poll, read, .. } = self;
        tokio::select! {
            read = finished(read.as_mut().map(|(_, read)| read)) => FinishedRead::Read(read),
            polled = finished(poll.as_mut()) => FinishedRead::Poll(polled),
        }
    }

    /// Tells the subscriber queues that a poll found something for them in the database.
    pub(super) fn finish_poll(
        &mut self,
        polled: TaskResult<NewMessages>,
        ownership: &mut Ownership,
        queues: &mut Queues,
    ) -> Result<Next, DispatchError> {
        self.poll = None;
        let new = flatten(polled)?;
        if !ownership.is_of(new.directory_version.incarnation) {
            return Ok(Next::Rejoin);
        }
        ownership.notice_version(new.directory_version);
        if !self.announced.advance_to(new.newest) {
            return Ok(Next::Continue);
        }
        self.advanced_at = Instant::now();
        let commanded: HashSet<_> = new.commanded.into_iter().collect();
        for subscriber in new.subscribers {
            let Some(queue) = queues.get_mut(subscriber) else { continue };
            let has_commands = commanded.contains(&subscriber);
            queue.mark_has_more();
            if has_commands {
                queue.mark_has_commands();
            }
            if has_commands || queue.may_send() {
                queues.activate(subscriber);
            }
        }
        Ok(Next::Continue)
    }

    /// Passes what was read to the subscriber queues. If the read failed, they request it again.
    pub(super) fn finish_read(
        &mut self,
        read: TaskResult<ReadResult>,
        ownership: &Ownership,
        queues: &mut Queues,
        now: DateTime<Utc>,
    ) -> Result<Next, DispatchError> {
        let Some((request, _)) = self.read.take() else { return Ok(Next::Continue) };
        match flatten(read) {
            Ok(ReadResult { incarnation: Some(incarnation), .. }) if !ownership.is_of(Some(incarnation)) => {
                Ok(Next::Rejoin)
            }
            Ok(result) => {
                pass(request, result, queues, now);
                Ok(Next::Continue)
            }
            Err(error) => {
                fail(request, queues);
                Err(error)
            }
        }
    }
}

/// Passes what was read to the subscriber queues.
fn pass(request: ReadRequest, mut result: ReadResult, queues: &mut Queues, now: DateTime<Utc>) {
    for read in request.queues {
        let messages = result.queues.remove(&read.subscriber).unwrap_or_default();
        if let Some(queue) = queues.get_mut(read.subscriber) {
            let is_complete = messages.len() < read.limit;
            queue.receive(messages, Origin::Read { is_complete });
            queues.activate(read.subscriber);
        }
    }
    for (subscriber, read) in request.lanes {
        let messages = result.lanes.remove(&(subscriber, read.key.clone())).unwrap_or_default();
        if let Some(queue) = queues.get_mut(subscriber) {
            queue.receive_lane(&read, messages);
            queues.activate(subscriber);
        }
    }
    for (subscriber, command) in result.commands {
        if let Some(queue) = queues.get_mut(subscriber) {
            queue.execute(command, now);
            queues.activate(subscriber);
        }
    }
}

/// Lets the subscriber queues request again what could not be read.
fn fail(request: ReadRequest, queues: &mut Queues) {
    for read in request.queues {
        if let Some(queue) = queues.get_mut(read.subscriber) {
            queue.fail_read();
        }
    }
    for (subscriber, read) in request.lanes {
        if let Some(queue) = queues.get_mut(subscriber) {
            queue.fail_lane_read(read);
        }
    }
    for subscriber in request.commands {
        if let Some(queue) = queues.get_mut(subscriber) {
            queue.mark_has_commands();
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
impl Reader {
    /// Sets the announced position.
    pub(super) fn assume_announced(&mut self, n: i64) {
        self.announced = AnnouncedPosition(Some(n));
    }

    pub(super) fn announced(&self) -> Option<i64> {
        self.announced.0
    }

    /// What the read in flight is for.
    pub(super) fn requested(&self) -> ReadRequest {
        self.read.as_ref().map(|(request, _)| request.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_handed_over_only_without_a_gap_before_it() {
        let mut announced = AnnouncedPosition::default();
        assert!(!announced.advance_contiguously(0, 5), "not before the position is loaded");
        announced = AnnouncedPosition(Some(10));
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
