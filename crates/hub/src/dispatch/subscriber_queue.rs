//! The in-memory state of one subscriber while this process sends to it.
//!
//! A subscriber queue decides which message is sent next and what the result of an attempt leads to. It performs no I/O and
//! gets the time as a parameter. The module documentation of `dispatch` describes the states of messages and lanes.
//!
//! The parts, each in its own file: [`Lanes`] (order), [`Limits`] (rate, breaker, in flight), [`ReadProgress`] (how far it
//! has read), [`ReplayLimits`] (the share of replays), [`UnsavedChanges`] (what the database does not have yet) and [`Commands`]
//! (of operators); `batches` sends several messages in one request. This file has the operations that involve several parts, in
//! the order of a message's life: receive, start, finish, save.

pub(crate) mod batches;
mod commands;
mod lanes;
mod limits;
mod read_progress;
mod replay_limits;
mod unsaved;
mod validity;

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::deliveries;

pub(super) use self::batches::StartedBatch;
use self::commands::Commands;
use self::lanes::{LANE_MESSAGES_MAX, Lanes};
use self::limits::Limits;
use self::read_progress::{MESSAGES_AHEAD_MAX, ReadProgress};
use self::replay_limits::ReplayLimits;
use self::unsaved::{POSITION_SAVE_PAUSE, UnsavedChanges, only_head_moved};
use self::validity::Validity;
use crate::deliveries::attempt_result::{Attempt, AttemptResult};
use crate::deliveries::domain::{OnExhausted, Outcome, Reason, Verdict, backoff};
use crate::deliveries::message::{HubMessage, LaneKey};
use crate::deliveries::recipient::Recipient;
use crate::dispatch::changes::{Changes, NewDeadLetter, Recovery};
use crate::dispatch::reads::{LaneReadRequest, QueueReadRequest, StoredState};
use crate::health::counts::HealthCounts;

/// The path on which messages reach a subscriber queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// Fan-out in this process handed them over. They follow directly after the last message that the dispatcher has
    /// announced to its queues.
    HandedOver,
    /// They were read from the database after the queue's read position; if `is_complete`, these are all there are.
    Read { is_complete: bool },
}

/// What happens to a message after an attempt.
#[derive(Clone, Copy)]
enum NextStep {
    Complete,
    RetryAfter(Duration),
    DeadLetter(Reason),
}

/// Whether the message is one of the hub's own events. A report about the delivery of a report could lead to the next one,
/// without end.
fn is_report(message: &HubMessage) -> bool {
    message.event.as_ref().is_some_and(|event| deliveries::system_event::is_system_source(&event.source))
}

/// How long ago the event was posted, if the message is delivered and was not sent again on request. The clocks of the database
/// and of this process may differ a little.
fn time_since_post(message: &HubMessage, outcome: Outcome, now: DateTime<Utc>) -> Option<Duration> {
    let is_first_delivery = outcome == Outcome::Delivered && message.replay.is_none() && message.attempts_before == 0;
    let event = message.event.as_ref().filter(|_| is_first_delivery)?;
    Some((now - event.at).to_std().unwrap_or_default())
}

pub(super) struct SubscriberQueue {
    pub(super) recipient: Arc<Recipient>,
    /// Distinguishes this queue from earlier ones of the same subscriber: the result of an attempt that an earlier queue
    /// started is ignored.
    pub(super) generation: u64,
    pub(super) validity: Validity,
    /// The status with which the subscriber has switched itself off: nothing is sent until it changes.
    answered_gone: Option<u16>,
    /// Since when messages wait for a batch to become full. None: no lane is ready, or there are no batches.
    batch_since: Option<DateTime<Utc>>,
    /// The queue waits for a slot. Set by the sender.
    pub(super) waits_for_slot: bool,
    /// Attempts in flight that were started while the subscriber was slow. Set by the sender.
    pub(super) slow_in_flight: usize,
    lanes: Lanes,
    limits: Limits,
    progress: ReadProgress,
    unsaved: UnsavedChanges,
    commands: Commands,
    health: HealthCounts,
    replays: ReplayLimits,
}

impl SubscriberQueue {
    pub(super) fn new(recipient: Arc<Recipient>, generation: u64, stored: StoredState, now: DateTime<Utc>) -> Self {
        SubscriberQueue {
            recipient,
            generation,
            validity: Validity::default(),
            answered_gone: None,
            batch_since: None,
            waits_for_slot: false,
            slow_in_flight: 0,
            lanes: Lanes::new(stored.lanes, stored.completed, now),
            limits: Limits::new(now),
            progress: ReadProgress::new(stored.position),
            unsaved: UnsavedChanges::new(stored.position, now),
            commands: Commands::new(),
            health: HealthCounts::default(),
            replays: ReplayLimits::default(),
        }
    }

    /// Whether anything may be sent at all, apart from the limits.
    pub(super) fn may_send(&self) -> bool {
        self.recipient.is_enabled && self.answered_gone.is_none()
    }

    /// Whether the database does not have the outcome of an attempt or the row of a lane. False does not mean idle: attempts
    /// may be in flight, the position may be unsaved, and messages may be ready to be sent.
    pub(super) fn has_unsaved_outcomes(&self) -> bool {
        self.unsaved.has_outcomes() || self.lanes.is_dirty()
    }

    /// Whether the queue could continue if messages or commands were read for it.
    pub(super) fn needs_read(&self) -> bool {
        self.commands.need_read || self.read_request().is_some() || (self.lanes.needs_read() && self.may_send())
    }

    pub(super) fn in_flight(&self) -> usize {
        self.limits.in_flight()
    }

    /// Whether its attempts occupy their slots for a long time.
    pub(super) fn is_slow(&self, now: DateTime<Utc>) -> bool {
        self.limits.is_slow(now)
    }

    /// Whether a message may be sent now, if there is a slot for it.
    pub(super) fn can_start(&mut self, now: DateTime<Utc>) -> bool {
        self.lanes.wake_due(now);
        self.has_ready(now)
            && self.may_send()
            && self.limits.allow(&self.recipient.limits, now)
            && self.recipient.batch.is_none_or(|batch| self.is_batch_due(batch, now))
    }

    /// Marks the next message as in flight and returns it. None if no message may be sent now.
    pub(super) fn start_next(&mut self, now: DateTime<Utc>) -> Option<(LaneKey, HubMessage)> {
        if !self.can_start(now) {
            return None;
        }
        let may_replay = self.replays.allow(self.recipient.limits.max_in_flight, now);
        let started = self.lanes.start_next(may_replay)?;
        if started.1.replay.is_some() {
            self.replays.start(started.0.clone());
        }
        self.limits.start_attempt(&self.recipient.limits, now);
        Some(started)
    }

    /// Whether a live message, or a message of a replay that may be sent now, is ready.
    fn has_ready(&self, now: DateTime<Utc>) -> bool {
        let may_replay = self.replays.allow(self.recipient.limits.max_in_flight, now);
        self.lanes.has_ready_live() || (may_replay && self.lanes.has_ready())
    }

    /// When the dispatcher has to check this queue again if nothing else happens before.
    pub(super) fn next_wake(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let save = [self.next_save(), self.health.next_save(self.recipient.id)].into_iter().flatten().min();
        if !self.may_send() {
            return save;
        }
        let allowed = self.limits.next_allowed_at(&self.recipient.limits, now).filter(|_| self.lanes.has_ready());
        let replays = self.replays.paused_until(now).filter(|_| self.lanes.has_ready());
        [self.lanes.next_due(), allowed, self.next_batch_at(now), replays, save].into_iter().flatten().min()
    }

    /// The tenant may have changed the settings of the subscriber. Attempts that are still connecting with the old ones are
    /// not sent: their messages are ready again.
    pub(super) fn update_recipient(&mut self, recipient: Arc<Recipient>) {
        if recipient.version != self.recipient.version {
            self.answered_gone = None;
            self.limits.clear_pause();
            self.replays.clear_pause();
            self.validity = Validity::default();
        }
        self.recipient = recipient;
    }

    // ---- receive

    /// The read that this queue needs, if there is more to read and it wants more messages in memory.
    pub(super) fn read_request(&self) -> Option<QueueReadRequest> {
        // More is read if few messages are in memory. While the breaker is open, also only if no other message can be
        // probed now: one that waits for its retry cannot.
        let has_room = self.lanes.queued() <= self.progress.messages_max() / 4;
        let can_probe = self.lanes.has_ready() || self.lanes.needs_read() || self.limits.in_flight() > 0;
        let wants_messages = has_room && !(self.limits.is_breaker_open() && can_probe);
        let needs_read = self.progress.has_more && !self.progress.is_reading && self.may_send() && wants_messages;
        needs_read.then(|| QueueReadRequest {
            subscriber: self.recipient.id,
            after: self.progress.read_to,
            limit: self.progress.messages_max(),
        })
    }

    /// Like [`Self::read_request`], and marks the read as in flight.
    pub(super) fn start_read(&mut self) -> Option<QueueReadRequest> {
        let request = self.read_request()?;
        self.progress.start_read();
        Some(request)
    }

    /// The read failed: the queue requests it again.
    pub(super) fn fail_read(&mut self) {
        self.progress.fail_read();
    }

    /// The database has messages for this subscriber that the queue has not read.
    pub(super) fn mark_has_more(&mut self) {
        self.progress.has_more = true;
    }

    /// Accepts messages from either path, in the order of their numbers. Both paths end here, so that a message is queued
    /// once however it came: `read_to` tells which numbers the queue already has.
    pub(super) fn receive(&mut self, mut messages: Vec<HubMessage>, origin: Origin) {
        match origin {
            Origin::Read { is_complete } => self.progress.finish_read(is_complete),
            Origin::HandedOver => {
                // A read may have returned a message before fan-out handed it over.
                messages.retain(|message| message.n > self.progress.read_to);
                if messages.is_empty() {
                    return;
                }
                if !self.accepts_handed_over() {
                    self.progress.has_more = true;
                    return;
                }
            }
        }
        self.progress.measure(&messages);
        for message in messages {
            self.progress.read_to = self.progress.read_to.max(message.n);
            self.lanes.push(message);
        }
    }

    /// False if something lies between the read position and the new messages, or if too many messages are in memory: then
    /// the queue reads them from the database later.
    fn accepts_handed_over(&self) -> bool {
        let is_contiguous = !self.progress.has_more && !self.progress.is_reading;
        is_contiguous && self.lanes.queued() <= self.progress.messages_max() && self.may_send()
    }

    /// Starts reads for up to `lanes_max` detached lanes that cannot continue without.
    pub(super) fn start_lane_reads(&mut self, now: DateTime<Utc>, lanes_max: usize) -> Vec<LaneReadRequest> {
        self.lanes.wake_due(now);
        let is_full = self.limits.in_flight() + self.lanes.ready_count() >= MESSAGES_AHEAD_MAX;
        if !self.may_send() || !self.lanes.needs_read() || is_full {
            return Vec::new();
        }
        let lanes_max = if self.limits.is_breaker_open() { 1 } else { lanes_max };
        let limit = self.progress.messages_max().min(LANE_MESSAGES_MAX);
        self.lanes.start_reads(lanes_max, limit, self.progress.read_to)
    }

    /// Accepts the messages that were read for a detached lane.
    pub(super) fn receive_lane(&mut self, request: &LaneReadRequest, messages: Vec<HubMessage>) {
        self.progress.measure(&messages);
        self.lanes.finish_read(request, messages, self.progress.read_to);
    }

    /// The read for a detached lane failed: the lane requests it again.
    pub(super) fn fail_lane_read(&mut self, request: LaneReadRequest) {
        self.lanes.fail_read(request);
    }

    // ---- finish

    /// Applies the result of the attempt at the head of this lane. `jitter`, from 0 to 1, spreads the retries of messages
    /// that failed together.
    pub(super) fn finish_attempt(&mut self, key: &LaneKey, result: AttemptResult, now: DateTime<Utc>, jitter: f64) {
        let (failing_since, was_open) = (self.health.failing_since(), self.limits.is_breaker_open());
        let is_replay = self.replays.finish(key);
        let pause = self.record_result(&result, is_replay, now);
        let Some(lane) = self.lanes.get_mut(key) else { return };
        lane.is_in_flight = false;
        let Some(message) = lane.queue.front().cloned() else { return };
        lane.attempts += 1;
        // The backoff starts anew when an operator retries the message; the numbers of its attempts do not.
        let run_attempts = lane.attempts;
        let attempt = message.attempts_before.saturating_add(run_attempts);
        let next_step = self.next_step(&result, run_attempts, pause, jitter);
        let outcome = match next_step {
            NextStep::Complete => Outcome::Delivered,
            NextStep::RetryAfter(_) => Outcome::Failed,
            NextStep::DeadLetter(_) => Outcome::Dead,
        };
        self.health.record(outcome, &result, self.limits.is_breaker_open(), now);
        if !is_report(&message) {
            self.report_recovery(&result, failing_since, was_open, now);
        }
        let detail = result.dead_letter_detail();
        let (n, subscriber) = (message.n, self.recipient.id);
        self.unsaved.attempts.push(Attempt {
            at: now,
            subscriber,
            n,
            attempt,
            outcome,
            result,
            replay: message.replay,
            was_dead: message.attempts_before > 0,
            time_since_post: time_since_post(&message, outcome, now),
        });
        match next_step {
            NextStep::Complete => self.lanes.complete_head(key),
            // An operator has given the message up during the attempt: it is not retried, so it does not wait either.
            NextStep::RetryAfter(_) if self.commands.has_dead_letter_request(n) => self.lanes.schedule_at(key, n, now),
            NextStep::RetryAfter(pause) => self.lanes.schedule_at(key, n, now + pause),
            NextStep::DeadLetter(reason) => {
                let recipient = self.recipient.clone();
                let dead_letter = NewDeadLetter { recipient, message, reason, detail, attempts: attempt, at: now };
                self.unsaved.dead_letters.push(dead_letter);
                if self.blocks_lane(key, reason) { self.lanes.block(key, n) } else { self.lanes.complete_head(key) }
            }
        }
    }

    /// Updates the limits with the result of a request. Returns the pause that the subscriber requests.
    fn record_result(&mut self, result: &AttemptResult, is_replay: bool, now: DateTime<Utc>) -> Option<Duration> {
        self.limits.finish_attempt(now);
        if result.not_sent.is_none() {
            self.limits.record_time(result.latency);
        }
        let pause = result.retry_after.filter(|_| result.verdict == Verdict::Retry);
        // A replay that fails must not hold up live messages: it opens no breaker, and only replays wait for its pause.
        if is_replay && result.verdict != Verdict::Delivered {
            self.replays.pause(pause, now)
        } else {
            self.limits.record(result.verdict, pause, now)
        }
        if result.verdict == Verdict::Gone {
            self.answered_gone = result.status;
        }
        pause
    }

    /// Reports that the subscriber has recovered if this result has closed its breaker. The attempts failed since
    /// `failing_since`, and the breaker `was_open` before it.
    fn report_recovery(
        &mut self,
        result: &AttemptResult,
        failing_since: Option<DateTime<Utc>>,
        was_open: bool,
        now: DateTime<Utc>,
    ) {
        if was_open && result.verdict == Verdict::Delivered {
            self.unsaved.recoveries.push(Recovery { recipient: self.recipient.clone(), failing_since, at: now });
        }
    }

    /// The attempt at the head of this lane was not sent: the head is ready again.
    pub(super) fn cancel_attempt(&mut self, key: &LaneKey, now: DateTime<Utc>) {
        self.limits.finish_attempt(now);
        self.replays.finish(key);
        self.lanes.return_head(key);
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
    /// no later message that could wait.
    fn blocks_lane(&self, key: &LaneKey, reason: Reason) -> bool {
        let is_failure = match reason {
            Reason::Exhausted | Reason::Refused => true,
            Reason::Gone | Reason::Manual | Reason::Expired => false,
        };
        is_failure && self.recipient.retry.on_exhausted == OnExhausted::Block && key.name().is_some()
    }

    // ---- save

    /// All messages up to this number have a final outcome, or belong to a detached lane.
    fn position(&self) -> i64 {
        self.lanes.first_pending().map_or(self.progress.read_to, |first| first - 1)
    }

    /// Whether the message is beyond the position, so that it may still have to be sent. A message before the position has
    /// its final outcome, unless it belongs to a detached lane.
    pub(super) fn is_beyond_position(&self, n: i64) -> bool {
        n > self.position()
    }

    /// Moves the changes that are due into `changes`. The queue then regards them as saved: if the save fails for good, the
    /// dispatcher resets and loads the queue again.
    pub(super) fn drain_changes(&mut self, now: DateTime<Utc>, changes: &mut Changes) {
        let subscriber = self.recipient.id;
        changes.attempts.append(&mut self.unsaved.attempts);
        changes.dead_letters.append(&mut self.unsaved.dead_letters);
        changes.recoveries.append(&mut self.unsaved.recoveries);
        self.health.drain(subscriber, now, &mut changes.health);
        changes.executed_commands.append(&mut self.commands.executed);
        changes.rejected_retries.extend(self.commands.rejected_retries.drain(..).map(|n| (subscriber, n)));
        changes.deleted_lanes.extend(self.lanes.drain_deleted_rows().map(|head| (subscriber, head)));
        if let Some(status) = self.answered_gone.filter(|_| self.recipient.is_enabled) {
            changes.gone_subscribers.push((subscriber, self.recipient.version, status));
        }
        let mut has_new_row = false;
        self.lanes.save_dirty(now, |lane, row| {
            if only_head_moved(lane, &row, now) {
                return false;
            }
            has_new_row |= lane.saved.is_none();
            if lane.saved.as_ref() != Some(&row) {
                changes.deleted_lanes.extend(lane.saved.take().map(|saved| (subscriber, saved.head)));
                lane.saved = Some(row.clone());
                lane.saved_at = Some(now);
                changes.saved_lanes.push((subscriber, row));
            }
            true
        });
        if !has_new_row && now - self.unsaved.checked_at < POSITION_SAVE_PAUSE {
            return;
        }
        self.unsaved.checked_at = now;
        let position = self.position();
        // The row of a newly detached lane and the position that moves past its messages are saved together.
        if position > self.unsaved.saved_position {
            self.unsaved.saved_position = position;
            changes.positions.push((subscriber, position));
        }
    }

    /// When the next rate-limited change (position or lane head) is due to be saved. None if there is none.
    pub(super) fn next_save(&self) -> Option<DateTime<Utc>> {
        let has_changes = self.lanes.is_dirty() || self.position() > self.unsaved.saved_position;
        has_changes.then(|| self.unsaved.checked_at + POSITION_SAVE_PAUSE)
    }

    /// Whether there are changes to save now.
    pub(super) fn has_changes(&self, now: DateTime<Utc>) -> bool {
        self.unsaved.has_outcomes()
            || self.lanes.has_deleted_rows()
            || !self.commands.executed.is_empty()
            || self.next_save().is_some_and(|at| at <= now)
            || self.health.next_save(self.recipient.id).is_some_and(|at| at <= now)
    }

    /// Moves all counts into `changes`, also those of the current minute: another process may send from now on.
    pub(super) fn drain_health(&mut self, changes: &mut Changes) {
        self.health.drain_all(self.recipient.id, &mut changes.health);
    }
}

#[cfg(test)]
impl SubscriberQueue {
    /// Sets the state after an attempt with a quick answer.
    pub(super) fn assume_fast(&mut self) {
        self.limits.record_time(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests;
