//! The result of an attempt: what it means for the message, its lane and the limits.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::SubscriberQueue;
use crate::delivery::{Attempt, AttemptResult, NewDeadLetter};
use crate::domain::{OnExhausted, Outcome, Reason, Verdict, backoff};
use crate::hub_message::LaneKey;

/// What happens to a message after an attempt.
enum NextStep {
    Complete,
    RetryAfter(Duration),
    DeadLetter(Reason),
}

impl SubscriberQueue {
    /// Applies the result of the attempt at the head of this lane. `jitter`, from 0 to 1, spreads the retries of messages
    /// that failed together.
    pub(in crate::dispatch) fn finish_attempt(
        &mut self,
        key: &LaneKey,
        result: AttemptResult,
        now: DateTime<Utc>,
        jitter: f64,
    ) {
        self.limits.finish_attempt();
        let Some(lane) = self.lanes.get_mut(key) else { return };
        lane.is_in_flight = false;
        let Some(message) = lane.queue.front().cloned() else { return };
        lane.attempts += 1;
        let (attempt, verdict) = (lane.attempts, result.verdict);
        let pause = result.retry_after.filter(|_| verdict == Verdict::Retry);
        self.limits.record(verdict, pause, now);
        self.answered_gone |= verdict == Verdict::Gone;
        let next_step = self.next_step(&result, attempt, pause, jitter);
        let outcome = match next_step {
            NextStep::Complete => Outcome::Delivered,
            NextStep::RetryAfter(_) => Outcome::Failed,
            NextStep::DeadLetter(_) => Outcome::Dead,
        };
        let detail = result.dead_letter_detail();
        let (n, subscriber) = (message.n, self.recipient.id);
        self.unsaved.attempts.push(Attempt { at: now, subscriber, n, attempt, outcome, result });
        match next_step {
            NextStep::Complete => self.lanes.complete_head(key),
            NextStep::RetryAfter(pause) => self.lanes.postpone(key, n, now + pause),
            NextStep::DeadLetter(reason) => {
                let recipient = self.recipient.clone();
                let dead_letter = NewDeadLetter { recipient, message, reason, detail, attempts: attempt, at: now };
                self.unsaved.dead_letters.push(dead_letter);
                match self.blocks_lane(key, reason) {
                    true => self.lanes.block(key, n),
                    false => self.lanes.complete_head(key),
                }
            }
        }
    }

    fn next_step(&self, result: &AttemptResult, attempt: u16, pause: Option<Duration>, jitter: f64) -> NextStep {
        match result.verdict {
            Verdict::Delivered => NextStep::Complete,
            Verdict::Retry => match backoff(&self.recipient.retry.backoff, u32::from(attempt), jitter) {
                Some(backoff) => NextStep::RetryAfter(backoff.max(pause.unwrap_or_default())),
                None => NextStep::DeadLetter(Reason::Exhausted),
            },
            Verdict::Refused => NextStep::DeadLetter(result.not_sent.unwrap_or(Reason::Refused)),
            Verdict::Gone => NextStep::DeadLetter(Reason::Gone),
        }
    }

    /// Whether the lane waits for an operator after its head became a dead letter. A message without an ordering key has
    /// nothing behind it that could wait.
    fn blocks_lane(&self, key: &LaneKey, reason: Reason) -> bool {
        let is_failure = match reason {
            Reason::Exhausted | Reason::Refused => true,
            Reason::Gone | Reason::Manual | Reason::Expired => false,
        };
        is_failure && self.recipient.retry.on_exhausted == OnExhausted::Block && key.name().is_some()
    }
}
