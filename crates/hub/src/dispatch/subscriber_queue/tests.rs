//! Tests of a subscriber queue against a simulated database.

mod batch_behaviour;
mod behaviour;
mod random_model;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::*;
use crate::deliveries::attempt_result::AttemptResult;
use crate::deliveries::domain::{OnExhausted, Outcome, Verdict};
use crate::deliveries::message::fixtures::event;
use crate::deliveries::recipient::{RecipientBatch, RecipientLimits, RecipientRetry, fixtures};
use crate::dispatch::changes::{Changes, LaneRow};
use crate::dispatch::reads::LaneReadRequest;

fn now() -> DateTime<Utc> {
    DateTime::<Utc>::UNIX_EPOCH + TimeDelta::days(20_000)
}

fn recipient(max_in_flight: usize, on_exhausted: OnExhausted) -> Arc<Recipient> {
    let recipient = fixtures::recipient();
    let retry = RecipientRetry { on_exhausted, ..recipient.retry };
    Arc::new(Recipient { limits: RecipientLimits { max_in_flight, rate: None }, retry, ..recipient })
}

fn with_batch(recipient: Arc<Recipient>, batch: Option<RecipientBatch>) -> Arc<Recipient> {
    let mut recipient = Arc::into_inner(recipient).unwrap();
    recipient.batch = batch;
    Arc::new(recipient)
}

fn result(verdict: Verdict) -> AttemptResult {
    let (status, error) = match verdict {
        Verdict::Delivered => (Some(200), None),
        Verdict::Retry => (Some(500), Some("status")),
        Verdict::Refused => (Some(400), Some("status")),
        Verdict::Gone => (Some(410), Some("status")),
    };
    AttemptResult {
        verdict,
        retry_after: None,
        status,
        latency: Duration::ZERO,
        error,
        detail: None,
        excerpt: None,
        not_sent: None,
    }
}

/// The database of one subscriber. Loading, saving and reading behave like the statements of the store.
#[derive(Default)]
struct Database {
    messages: BTreeMap<i64, Option<Arc<str>>>,
    position: i64,
    lanes: BTreeMap<i64, LaneRow>,
    /// Final outcomes.
    completed: BTreeMap<i64, Outcome>,
    payload_bytes: usize,
    /// The replays of messages that were created by one.
    replays: BTreeMap<i64, Uuid>,
}

impl Database {
    fn message(&self, n: i64) -> HubMessage {
        let event = event(self.payload_bytes);
        let lane = self.messages[&n].clone();
        let replay = self.replays.get(&n).copied();
        HubMessage { n, lane, seq: None, attempts_before: 0, replay, event: Some(Arc::new(event)) }
    }

    fn load(&self, recipient: Arc<Recipient>, now: DateTime<Utc>) -> SubscriberQueue {
        let first_pending = |row: &LaneRow| {
            let of_lane = self.messages.range(row.head..).filter(|(_, lane)| row.lane.is_some() && **lane == row.lane);
            let end = of_lane.clone().next_back().map_or(row.head, |(n, _)| *n + 1);
            of_lane.map(|(n, _)| *n).find(|n| !self.completed.contains_key(n)).unwrap_or(end)
        };
        let lanes = self.lanes.values().map(|row| {
            let is_fixed = row.next_at.is_none() || row.manual_retry || row.lane.is_none();
            let next = if is_fixed { row.head } else { first_pending(row) };
            (LaneRow { attempts: if next == row.head { row.attempts } else { 0 }, ..row.clone() }, next)
        });
        let completed = self.completed.range(self.position + 1..).map(|(n, _)| *n).collect();
        let stored = StoredState { position: self.position, lanes: lanes.collect(), completed };
        SubscriberQueue::new(recipient, 0, stored, now)
    }

    /// Saves the changes and checks that no message is lost.
    fn save(&mut self, changes: Changes) {
        for attempt in changes.attempts {
            if attempt.outcome != Outcome::Failed {
                self.completed.insert(attempt.n, attempt.outcome);
            }
        }
        for (_, head) in changes.deleted_lanes {
            self.lanes.remove(&head);
        }
        for (_, row) in changes.saved_lanes {
            self.save_lane(row);
        }
        for (_, position) in changes.positions {
            assert!(position >= self.position, "a position moves forward");
            self.position = position;
        }
        for (n, lane) in self.messages.range(..=self.position) {
            let is_in_a_lane = self.lanes.values().any(|row| match &row.lane {
                Some(_) => row.lane == *lane && row.head <= *n,
                None => row.head == *n,
            });
            let is_completed = self.completed.contains_key(n);
            assert!(is_completed || is_in_a_lane, "{n} is lost: before the position, pending, and in no detached lane");
        }
    }

    fn save_lane(&mut self, row: LaneRow) {
        let same_head = self.lanes.get(&row.head);
        assert!(same_head.is_none_or(|other| other.lane == row.lane), "a row belongs to one lane");
        assert!(self.messages[&row.head] == row.lane, "the head of a row belongs to its lane");
        let is_same_lane = |other: &LaneRow| other.lane.is_some() && other.lane == row.lane;
        assert!(!self.lanes.values().any(|other| is_same_lane(other) && other.head != row.head), "a lane has one row");
        self.lanes.insert(row.head, row);
    }

    /// Performs the reads that the queue requests.
    fn read(&self, queue: &mut SubscriberQueue, now: DateTime<Utc>) {
        self.start_read(queue, now).finish(queue);
    }

    /// Messages that are added from now on are not part of the read.
    fn start_read(&self, queue: &mut SubscriberQueue, now: DateTime<Utc>) -> ReadInFlight {
        let mut read = ReadInFlight::default();
        if let Some(request) = queue.start_read() {
            let numbers = self.messages.range(request.after + 1..).take(request.limit).map(|(n, _)| *n);
            read.queue = Some((numbers.map(|n| self.message(n)).collect(), request.limit));
        }
        for request in queue.start_lane_reads(now, 8) {
            let is_in_lane = |(n, lane): &(&i64, &Option<Arc<str>>)| match &request.key {
                LaneKey::Named(name) => lane.as_ref() == Some(name),
                LaneKey::Single(single) => **n == *single,
            };
            let range = self.messages.range(request.after + 1..=request.to);
            let numbers = range.filter(is_in_lane).take(request.limit).map(|(n, _)| *n);
            let messages = numbers.map(|n| self.message(n)).collect();
            read.lanes.push((request, messages));
        }
        read
    }
}

/// A read that has its snapshot, but has not returned yet.
#[derive(Default)]
struct ReadInFlight {
    queue: Option<(Vec<HubMessage>, usize)>,
    lanes: Vec<(LaneReadRequest, Vec<HubMessage>)>,
}

impl ReadInFlight {
    fn finish(self, queue: &mut SubscriberQueue) {
        if let Some((messages, limit)) = self.queue {
            let is_complete = messages.len() < limit;
            queue.receive(messages, Origin::Read { is_complete });
        }
        for (request, messages) in self.lanes {
            queue.receive_lane(&request, messages);
        }
    }
}

/// Starts the next request, as the sender does: a batch, or a single message.
fn start_request(queue: &mut SubscriberQueue, now: DateTime<Utc>) -> Option<StartedBatch> {
    match queue.recipient.batch {
        Some(_) => queue.start_batch(now),
        None => {
            let (key, message) = queue.start_next(now)?;
            Some(StartedBatch { lanes: vec![(key, 1)], messages: vec![message] })
        }
    }
}

fn cancel_request(queue: &mut SubscriberQueue, request: &StartedBatch, now: DateTime<Utc>) {
    match queue.recipient.batch {
        Some(_) => queue.cancel_batch(&request.lanes, now),
        None => queue.cancel_attempt(&request.lanes[0].0, now),
    }
}

fn finish_request(
    queue: &mut SubscriberQueue,
    request: &StartedBatch,
    result: AttemptResult,
    now: DateTime<Utc>,
    jitter: f64,
) {
    match queue.recipient.batch {
        Some(_) => queue.finish_batch(&request.lanes, &result, now, jitter),
        None => queue.finish_attempt(&request.lanes[0].0, result, now, jitter),
    }
}

/// Starts all messages that may be sent at this time.
fn start_all(queue: &mut SubscriberQueue, now: DateTime<Utc>) -> Vec<(LaneKey, HubMessage)> {
    std::iter::from_fn(|| queue.start_next(now)).collect()
}

fn numbers(started: &[(LaneKey, HubMessage)]) -> Vec<i64> {
    started.iter().map(|(_, message)| message.n).collect()
}
