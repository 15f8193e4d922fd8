//! Batches: several messages of a subscriber in one request.
//!
//! A batch has the first messages of one or more ready lanes, in the order of each lane, and its lanes are in flight until its
//! result arrives. So a lane has at most one request in flight, as without batches. All messages of a batch have the same
//! result. After a failure their lanes wait like any lane whose head has failed, and batches are formed anew when they are
//! due:
//! - Only lanes with the same number of failures are sent together. A message that fails again and again does not make the
//!   first attempt of others fail.
//! - A lane is retried with the messages that failed together, as far as this process remembers. After a crash its head is
//!   retried alone, and the backoff of the messages behind it starts anew.
//!
//! So the same lanes usually form the same batch again, which has the same id, because the id is derived from the events.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::lanes::{Lanes, Turn};
use super::{NextStep, SubscriberQueue, is_report, time_since_post};
use crate::deliveries::attempt_result::{Attempt, AttemptResult};
use crate::deliveries::domain::Outcome;
use crate::deliveries::message::{HubMessage, LaneKey};
use crate::deliveries::recipient::RecipientBatch;
use crate::dispatch::changes::NewDeadLetter;

/// The approximate size of a request body. A batch has at least one message, whatever its size.
const BODY_BYTES_MAX: usize = 1_000_000;
/// What an item needs besides its payload and its lane, at most: names, ids, type and times.
const ITEM_BYTES: usize = 512;

/// Messages that are sent in one request.
#[derive(Debug, Default)]
pub(in crate::dispatch) struct StartedBatch {
    /// The lanes, and how many messages of each.
    pub(in crate::dispatch) lanes: Vec<(LaneKey, usize)>,
    pub(in crate::dispatch) messages: Vec<HubMessage>,
}

fn item_bytes(message: &HubMessage) -> usize {
    let payload = message.event.as_ref().map_or(0, |event| event.payload.len());
    payload + message.lane.as_ref().map_or(0, |lane| 2 * lane.len()) + ITEM_BYTES
}

impl Lanes {
    /// Whether the ready lanes have enough messages for a batch that need not wait for more.
    fn has_full_batch(&self, turn: Turn, max: usize) -> bool {
        let (mut count, mut bytes) = (0, 0);
        for lane in self.ready_lanes(turn) {
            count += lane.queue.len();
            bytes += lane.queue.iter().take(max).map(item_bytes).sum::<usize>();
            let has_stored = lane.detached.as_ref().is_some_and(|detached| detached.has_more);
            if count >= max || bytes >= BODY_BYTES_MAX || has_stored {
                return true;
            }
        }
        false
    }

    /// Marks the first messages of ready lanes as in flight and returns them: at most `max`, all of them live or all of one replay,
    /// and one alone if `goes_alone`.
    fn start_batch(
        &mut self,
        turn: Turn,
        max: usize,
        goes_alone: impl Fn(&HubMessage) -> bool,
    ) -> Option<StartedBatch> {
        let (mut batch, mut bytes, mut failures) = (StartedBatch::default(), 0, None);
        let mut others = Vec::new();
        while batch.messages.len() < max
            && let Some(key) = self.pop_ready(turn)
        {
            let Some(lane) = self.get_mut(&key) else { continue };
            let rest = max - batch.messages.len();
            // What failed together is retried together, unless it would never fit.
            let retried = (lane.attempts > 0 || lane.manual_retry).then(|| lane.failed_together.clamp(1, max));
            let count_max = retried.map_or(rest, |retried| retried.min(rest));
            let is_cut = retried.is_some_and(|retried| retried.min(lane.queue.len()) > rest);
            if failures.is_some_and(|failures| failures != lane.attempts) || (is_cut && !batch.messages.is_empty()) {
                others.push(key);
                continue;
            }
            let before = batch.messages.len();
            for message in lane.queue.iter().take(count_max) {
                let is_first = batch.messages.is_empty();
                let is_alone =
                    goes_alone(message) || batch.messages.first().is_some_and(|first| first.replay != message.replay);
                if !is_first && (is_alone || bytes + item_bytes(message) > BODY_BYTES_MAX) {
                    break;
                }
                bytes += item_bytes(message);
                batch.messages.push(message.clone());
                if is_alone {
                    bytes = BODY_BYTES_MAX;
                }
            }
            match batch.messages.len() - before {
                0 => others.push(key),
                count => {
                    (lane.is_in_flight, failures) = (true, Some(lane.attempts));
                    batch.lanes.push((key, count));
                }
            }
            if bytes >= BODY_BYTES_MAX {
                break;
            }
        }
        self.return_ready(turn, others);
        // The order in which their events were posted, and so that of each lane. A batch that is formed again is the same.
        batch.messages.sort_unstable_by_key(|message| message.n);
        (!batch.messages.is_empty()).then_some(batch)
    }
}

impl SubscriberQueue {
    /// Whether a batch need not wait for more messages. Called while a lane is ready: from the first call on, messages wait.
    pub(super) fn is_batch_due(&mut self, batch: RecipientBatch, now: DateTime<Utc>) -> bool {
        let since = *self.batch_since.get_or_insert(now);
        let is_full = |turn| self.lanes.has_full_batch(turn, batch.max);
        let may_replay = self.replays.allow(self.recipient.limits.max_in_flight, now);
        now >= since + batch.wait || is_full(Turn::Live) || (may_replay && is_full(Turn::Replay))
    }

    /// When the messages that wait for a batch are sent, however few they are.
    pub(super) fn next_batch_at(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let batch = self.recipient.batch.filter(|_| self.lanes.has_ready())?;
        self.batch_since.map(|since| since + batch.wait).filter(|at| *at > now)
    }

    /// Marks the messages of the next batch as in flight and returns them. None if none may be sent now.
    pub(in crate::dispatch) fn start_batch(&mut self, now: DateTime<Utc>) -> Option<StartedBatch> {
        let batch = self.recipient.batch?;
        if !self.can_start(now) {
            return None;
        }
        let commands = &self.commands;
        // Without content, or given up by an operator: it is not sent.
        let goes_alone = |message: &HubMessage| message.event.is_none() || commands.has_dead_letter_request(message.n);
        let turn = self.lanes.next_turn(self.replays.allow(self.recipient.limits.max_in_flight, now));
        let started = self.lanes.start_batch(turn, batch.max, goes_alone)?;
        if let (Turn::Replay, Some((key, _))) = (turn, started.lanes.first()) {
            self.replays.start(key.clone());
        }
        self.batch_since = None;
        self.limits.start_attempt(&self.recipient.limits, now);
        Some(started)
    }

    /// Applies the result of a batch to all its messages. `jitter` is as in [`SubscriberQueue::finish_attempt`], and the same
    /// for all lanes: they are due together.
    pub(in crate::dispatch) fn finish_batch(
        &mut self,
        lanes: &[(LaneKey, usize)],
        result: &AttemptResult,
        now: DateTime<Utc>,
        jitter: f64,
    ) {
        let (failing_since, was_open) = (self.health.failing_since(), self.limits.is_breaker_open());
        let is_replay = lanes.first().is_some_and(|(key, _)| self.replays.finish(key));
        let pause = self.record_result(result, is_replay, now);
        let mut heads = lanes.iter().filter_map(|(key, _)| self.lanes.get(key)?.queue.front());
        if heads.any(|head| !is_report(head)) {
            self.report_recovery(result, failing_since, was_open, now);
        }
        for (key, count) in lanes {
            self.finish_share(key, *count, result, pause, now, jitter);
        }
    }

    /// The batch was not sent: its messages are ready again.
    pub(in crate::dispatch) fn cancel_batch(&mut self, lanes: &[(LaneKey, usize)], now: DateTime<Utc>) {
        self.limits.finish_attempt(now);
        if let Some((key, _)) = lanes.first() {
            self.replays.finish(key);
        }
        lanes.iter().rev().for_each(|(key, _)| self.lanes.return_head(key));
    }

    /// Applies the result of a batch to the first `count` messages of a lane.
    fn finish_share(
        &mut self,
        key: &LaneKey,
        count: usize,
        result: &AttemptResult,
        pause: Option<Duration>,
        now: DateTime<Utc>,
        jitter: f64,
    ) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        (lane.is_in_flight, lane.attempts) = (false, lane.attempts + 1);
        let run_attempts = lane.attempts;
        let messages: Vec<HubMessage> = lane.queue.iter().take(count).cloned().collect();
        let Some(head) = messages.first().map(|head| head.n) else { return };
        let next_step = self.next_step(result, run_attempts, pause, jitter);
        // Of a lane that blocks, only the head is a dead letter: the others wait behind it.
        let blocks = matches!(next_step, NextStep::DeadLetter(reason) if self.blocks_lane(key, reason));
        for message in messages {
            let attempt = message.attempts_before.saturating_add(run_attempts);
            let (n, replay, was_dead) = (message.n, message.replay, message.attempts_before > 0);
            let (subscriber, result) = (self.recipient.id, result.clone());
            let outcome = match next_step {
                NextStep::Complete => Outcome::Delivered,
                NextStep::DeadLetter(_) if n == head || !blocks => Outcome::Dead,
                NextStep::DeadLetter(_) | NextStep::RetryAfter(_) => Outcome::Failed,
            };
            let time_since_post = time_since_post(&message, outcome, now);
            if let (NextStep::DeadLetter(reason), Outcome::Dead) = (next_step, outcome) {
                let (recipient, detail) = (self.recipient.clone(), result.dead_letter_detail());
                let dead_letter = NewDeadLetter { recipient, message, reason, detail, attempts: attempt, at: now };
                self.unsaved.dead_letters.push(dead_letter);
            }
            self.health.record(outcome, &result, self.limits.is_breaker_open(), now);
            self.unsaved.attempts.push(Attempt {
                at: now,
                subscriber,
                n,
                attempt,
                outcome,
                result,
                replay,
                was_dead,
                time_since_post,
            });
        }
        match next_step {
            NextStep::DeadLetter(_) if blocks => self.lanes.block(key, head),
            NextStep::Complete | NextStep::DeadLetter(_) => self.lanes.complete_heads(key, count),
            NextStep::RetryAfter(pause) => {
                if let Some(lane) = self.lanes.get_mut(key) {
                    lane.failed_together = count;
                }
                let is_given_up = self.commands.has_dead_letter_request(head);
                self.lanes.schedule_at(key, head, if is_given_up { now } else { now + pause });
            }
        }
    }
}
