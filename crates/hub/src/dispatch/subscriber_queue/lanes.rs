//! The lanes of one subscriber: the order of messages within a lane, and the turns between lanes.
//!
//! A lane is attached or detached. The subscriber's position waits for the messages of attached lanes. A detached lane has
//! its own row in the database and reads its messages itself, so the position moves past them.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use chrono::{DateTime, Utc};

use crate::deliveries::message::{HubMessage, LaneKey};
use crate::dispatch::changes::LaneRow;
use crate::dispatch::reads::LaneReadRequest;

/// While both are ready, one of this many messages belongs to a replay.
const REPLAY_TURN: u32 = 4;
/// Messages of one lane held in memory. A lane with more is detached and reads the rest later.
pub(super) const LANE_MESSAGES_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Lane {
    /// In order. The head may be in flight.
    pub(super) queue: VecDeque<HubMessage>,
    pub(super) is_in_flight: bool,
    /// Attempts of the head.
    pub(super) attempts: u16,
    /// The messages, from the head, that were in the batch that failed last.
    pub(super) failed_together: usize,
    pub(super) next_at: Option<DateTime<Utc>>,
    /// The head is a dead letter; the lane waits for an operator.
    pub(super) is_blocked: bool,
    /// An operator retries the dead head.
    pub(super) manual_retry: bool,
    pub(super) detached: Option<DetachedLane>,
}

#[derive(Debug, Clone)]
pub(super) struct DetachedLane {
    /// The row as it is in the database; None if it is not saved yet.
    pub(super) saved: Option<LaneRow>,
    pub(super) saved_at: Option<DateTime<Utc>>,
    /// The message that the row is saved with: the next one of this lane, or the last completed one while the next is not
    /// read yet. It identifies the row: no other lane has it.
    pub(super) head: i64,
    /// All messages of this lane up to this number were read.
    pub(super) read_to: i64,
    /// There may be more messages, up to where the subscriber queue has read.
    pub(super) has_more: bool,
    pub(super) is_reading: bool,
}

/// Live messages and those of replays take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Live,
    Replay,
}

#[derive(Debug, Default)]
pub(super) struct Lanes {
    by_key: HashMap<LaneKey, Lane>,
    /// Lanes with a live message to send, in turns.
    ready: VecDeque<LaneKey>,
    /// Lanes whose next message was created by a replay, in turns.
    ready_replays: VecDeque<LaneKey>,
    /// Live messages since the last message of a replay, while both were ready.
    live_starts: u32,
    /// Lanes that wait for their next attempt, by its time.
    due: BTreeSet<(DateTime<Utc>, LaneKey)>,
    /// Detached lanes that must read before they can send.
    needs_read: BTreeSet<LaneKey>,
    /// Messages of attached lanes without a final outcome. The subscriber's position stays before the first.
    pending: BTreeSet<i64>,
    /// Messages beyond the subscriber queue's read position that must not be queued when the queue reaches them: they have a
    /// final outcome, or their detached lane has already read them.
    not_to_queue: HashSet<i64>,
    /// Messages in the queues of all lanes.
    queued: usize,
    /// Lanes whose row may have to change.
    dirty: HashSet<LaneKey>,
    /// Heads of the rows of ended lanes.
    deleted_rows: Vec<i64>,
}

impl Lanes {
    /// Starts with the detached lanes as the database has them, each with its first message to send.
    pub(super) fn new(rows: Vec<(LaneRow, i64)>, completed: HashSet<i64>, now: DateTime<Utc>) -> Lanes {
        let mut lanes = Lanes { not_to_queue: completed, ..Lanes::default() };
        for (row, next) in rows {
            let key = LaneKey::new(row.lane.clone(), row.head);
            if let Some(next_at) = row.next_at {
                lanes.due.insert((next_at, key.clone()));
            }
            let lane = Lane {
                attempts: row.attempts,
                next_at: row.next_at,
                is_blocked: row.next_at.is_none(),
                manual_retry: row.manual_retry,
                detached: Some(DetachedLane {
                    read_to: next - 1,
                    saved_at: Some(now),
                    head: row.head,
                    has_more: true,
                    is_reading: false,
                    saved: Some(row),
                }),
                ..Lane::default()
            };
            lanes.by_key.insert(key, lane);
        }
        lanes
    }

    pub(super) fn get(&self, key: &LaneKey) -> Option<&Lane> {
        self.by_key.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &LaneKey) -> Option<&mut Lane> {
        self.by_key.get_mut(key)
    }

    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    pub(super) fn ready_count(&self) -> usize {
        self.ready.len() + self.ready_replays.len()
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty() || !self.ready_replays.is_empty()
    }

    pub(super) fn has_ready_live(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(super) fn needs_read(&self) -> bool {
        !self.needs_read.is_empty()
    }

    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    pub(super) fn has_deleted_rows(&self) -> bool {
        !self.deleted_rows.is_empty()
    }

    pub(super) fn next_due(&self) -> Option<DateTime<Utc>> {
        self.due.first().map(|(at, _)| *at)
    }

    pub(super) fn first_pending(&self) -> Option<i64> {
        self.pending.first().copied()
    }

    // ---- messages in

    /// Appends a message to its lane, in the order of numbers. Drops it if it must not be queued, or if its lane is
    /// detached and will read it (or has read it) itself.
    pub(super) fn push(&mut self, message: HubMessage) {
        if self.not_to_queue.remove(&message.n) {
            return;
        }
        let key = message.lane_key();
        let lane = self.by_key.entry(key.clone()).or_default();
        if let Some(detached) = &mut lane.detached {
            if matches!(key, LaneKey::Single(_)) || message.n <= detached.read_to {
                return;
            }
            if detached.has_more || detached.is_reading || lane.queue.len() >= LANE_MESSAGES_MAX {
                detached.has_more = true;
                return;
            }
            detached.read_to = message.n;
        } else {
            self.pending.insert(message.n);
        }
        lane.queue.push_back(message);
        self.queued += 1;
        if lane.queue.len() == 1 && !lane.is_in_flight {
            self.push_ready(key);
        } else if lane.detached.is_none() && lane.queue.len() > LANE_MESSAGES_MAX {
            self.detach(&key);
        }
    }

    /// Starts reads for up to `lanes_max` lanes. A lane reads up to `read_to`, the subscriber queue's read position, because
    /// the later messages come through the subscriber queue. The head of a lane can be beyond that: if the queue starts at
    /// 50 and the lane's head is 60, the lane reads 60 only.
    pub(super) fn start_reads(&mut self, lanes_max: usize, limit: usize, read_to: i64) -> Vec<LaneReadRequest> {
        let keys: Vec<LaneKey> = self.needs_read.iter().take(lanes_max).cloned().collect();
        let mut requests = Vec::new();
        for key in keys {
            self.needs_read.remove(&key);
            let Some(lane) = self.by_key.get_mut(&key) else { continue };
            let is_retried = lane.manual_retry;
            let Some(detached) = &mut lane.detached else { continue };
            (detached.is_reading, detached.has_more) = (true, false);
            let to = match key {
                LaneKey::Single(n) => n,
                LaneKey::Named(_) => read_to.max(detached.read_to + 1),
            };
            let retried_head = is_retried.then_some(detached.head);
            requests.push(LaneReadRequest { after: detached.read_to, to, key, limit, retried_head });
        }
        requests
    }

    /// Appends the messages that were read for a detached lane. Fewer than the requested limit means that these are all.
    pub(super) fn finish_read(&mut self, request: &LaneReadRequest, messages: Vec<HubMessage>, read_to: i64) {
        let is_complete = messages.len() < request.limit;
        // The subscriber queue reaches these numbers later, when this lane may have ended: remember not to queue them twice.
        self.not_to_queue.extend(messages.iter().map(|message| message.n).filter(|n| *n > read_to));
        let Some(lane) = self.by_key.get_mut(&request.key) else { return };
        let Some(detached) = &mut lane.detached else { return };
        detached.is_reading = false;
        detached.has_more |= !is_complete;
        detached.read_to = if is_complete { request.to } else { messages.last().map_or(request.after, |last| last.n) };
        self.queued += messages.len();
        lane.queue.extend(messages);
        if lane.queue.is_empty() {
            if detached.has_more {
                self.needs_read.insert(request.key.clone());
            } else {
                self.end(&request.key);
            }
        } else if !lane.is_in_flight {
            self.push_ready(request.key.clone());
        }
    }

    /// The read failed: the lane requests it again.
    pub(super) fn fail_read(&mut self, request: LaneReadRequest) {
        if let Some(detached) = self.by_key.get_mut(&request.key).and_then(|lane| lane.detached.as_mut()) {
            (detached.is_reading, detached.has_more) = (false, true);
            self.needs_read.insert(request.key);
        }
    }

    // ---- turns

    /// Moves the lanes whose time has come to the ready lanes, or to those that must read first.
    pub(super) fn wake_due(&mut self, now: DateTime<Utc>) {
        while self.due.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, key)) = self.due.pop_first() else { break };
            let Some(lane) = self.by_key.get_mut(&key) else { continue };
            lane.next_at = None;
            if lane.queue.is_empty() {
                self.needs_read.insert(key);
            } else {
                self.push_ready(key);
            }
        }
    }

    /// The head of the lane may be sent, in its turn.
    fn push_ready(&mut self, key: LaneKey) {
        self.ready_of(&key).push_back(key);
    }

    /// Where the lane waits for its turn: apart from others if its head was created by a replay.
    fn ready_of(&mut self, key: &LaneKey) -> &mut VecDeque<LaneKey> {
        let head = self.by_key.get(key).and_then(|lane| lane.queue.front());
        if head.is_some_and(|head| head.replay.is_some()) { &mut self.ready_replays } else { &mut self.ready }
    }

    /// Whose turn it is. A live message is never behind more than one request of a replay, and both get on while both are ready.
    pub(super) fn next_turn(&mut self, may_replay: bool) -> Turn {
        let has_replays = may_replay && !self.ready_replays.is_empty();
        self.live_starts = if has_replays { self.live_starts + 1 } else { 0 };
        if has_replays && (self.ready.is_empty() || self.live_starts >= REPLAY_TURN) {
            self.live_starts = 0;
            return Turn::Replay;
        }
        Turn::Live
    }

    /// Marks the head of the next ready lane as in flight and returns it.
    pub(super) fn start_next(&mut self, may_replay: bool) -> Option<(LaneKey, HubMessage)> {
        let turn = self.next_turn(may_replay);
        let key = self.pop_ready(turn)?;
        let lane = self.by_key.get_mut(&key)?;
        let message = lane.queue.front()?.clone();
        lane.is_in_flight = true;
        Some((key, message))
    }

    fn ready_in(&mut self, turn: Turn) -> &mut VecDeque<LaneKey> {
        match turn {
            Turn::Live => &mut self.ready,
            Turn::Replay => &mut self.ready_replays,
        }
    }

    /// The lanes with a message to send, in the order of their turns.
    pub(super) fn ready_lanes(&self, turn: Turn) -> impl Iterator<Item = &Lane> {
        let keys = match turn {
            Turn::Live => &self.ready,
            Turn::Replay => &self.ready_replays,
        };
        keys.iter().filter_map(|key| self.by_key.get(key))
    }

    /// Removes the next lane from the ready ones.
    pub(super) fn pop_ready(&mut self, turn: Turn) -> Option<LaneKey> {
        self.ready_in(turn).pop_front()
    }

    /// Lanes that [`Lanes::pop_ready`] returned, and whose turn is still the next one.
    pub(super) fn return_ready(&mut self, turn: Turn, keys: Vec<LaneKey>) {
        let ready = self.ready_in(turn);
        keys.into_iter().rev().for_each(|key| ready.push_front(key));
    }

    /// The head of the lane was not sent: it is the next one again.
    pub(super) fn return_head(&mut self, key: &LaneKey) {
        let Some(lane) = self.by_key.get_mut(key) else { return };
        if std::mem::replace(&mut lane.is_in_flight, false) {
            self.ready_of(key).push_front(key.clone());
        }
    }

    /// The head of the lane has its final outcome; the next message may be sent.
    pub(super) fn complete_head(&mut self, key: &LaneKey) {
        self.complete_heads(key, 1);
    }

    /// The first `count` messages of the lane have their final outcome; the next one may be sent.
    pub(super) fn complete_heads(&mut self, key: &LaneKey, count: usize) {
        let Some(lane) = self.by_key.get_mut(key) else { return };
        (lane.attempts, lane.failed_together, lane.manual_retry) = (0, 0, false);
        for message in lane.queue.drain(..count.min(lane.queue.len())) {
            self.queued -= 1;
            self.pending.remove(&message.n);
            if let Some(detached) = &mut lane.detached {
                detached.head = message.n;
            }
        }
        let has_more = lane.detached.as_ref().is_some_and(|detached| detached.has_more || detached.is_reading);
        if !lane.queue.is_empty() {
            if lane.detached.is_some() {
                self.dirty.insert(key.clone());
            }
            self.push_ready(key.clone());
        } else if has_more {
            self.needs_read.insert(key.clone());
            self.dirty.insert(key.clone());
        } else {
            self.end(key);
        }
    }

    /// Detaches the lane and schedules its next attempt, of `head`, at this time.
    pub(super) fn schedule_at(&mut self, key: &LaneKey, head: i64, next_at: DateTime<Utc>) {
        if let Some(lane) = self.unload(key, head) {
            lane.next_at = Some(next_at);
            self.due.insert((next_at, key.clone()));
        }
    }

    /// The lane waits for an operator to retry or dead-letter its head.
    pub(super) fn block(&mut self, key: &LaneKey, head: i64) {
        if let Some(lane) = self.unload(key, head) {
            (lane.is_blocked, lane.manual_retry, lane.next_at) = (true, false, None);
            lane.failed_together = 0;
        }
    }

    /// Moves the next attempt of the lane's head from its scheduled time to `now`.
    pub(super) fn expedite(&mut self, key: &LaneKey, head: i64, now: DateTime<Utc>) {
        if let Some(next_at) = self.by_key.get(key).and_then(|lane| lane.next_at) {
            self.due.remove(&(next_at, key.clone()));
            self.schedule_at(key, head, now);
        }
    }

    /// Detaches the lane at `head` and drops its messages from memory. They are read again when the lane continues.
    fn unload(&mut self, key: &LaneKey, head: i64) -> Option<&mut Lane> {
        self.detach(key);
        let lane = self.by_key.get_mut(key)?;
        self.queued -= lane.queue.len();
        for message in lane.queue.drain(..) {
            self.not_to_queue.remove(&message.n);
        }
        if let Some(detached) = &mut lane.detached {
            (detached.head, detached.read_to, detached.has_more) = (head, head - 1, true);
        }
        self.dirty.insert(key.clone());
        Some(lane)
    }

    /// From now on the lane has a row, and the subscriber's position no longer waits for it.
    fn detach(&mut self, key: &LaneKey) {
        let Some(lane) = self.by_key.get_mut(key) else { return };
        if lane.detached.is_some() {
            return;
        }
        for message in &lane.queue {
            self.pending.remove(&message.n);
        }
        let (Some(first), Some(last)) = (lane.queue.front(), lane.queue.back()) else { return };
        let (head, read_to) = (first.n, last.n);
        let detached = DetachedLane { saved: None, saved_at: None, head, read_to, has_more: false, is_reading: false };
        lane.detached = Some(detached);
        self.dirty.insert(key.clone());
    }

    /// The lane has nothing left to send.
    fn end(&mut self, key: &LaneKey) {
        if let Some(lane) = self.by_key.remove(key)
            && let Some(saved) = lane.detached.and_then(|detached| detached.saved)
        {
            self.deleted_rows.push(saved.head);
        }
        self.needs_read.remove(key);
        self.dirty.remove(key);
    }

    // ---- rows

    pub(super) fn drain_deleted_rows(&mut self) -> std::vec::Drain<'_, i64> {
        self.deleted_rows.drain(..)
    }

    /// Calls `save` with every dirty lane and its row. A lane stays dirty if `save` returns false.
    pub(super) fn save_dirty(&mut self, now: DateTime<Utc>, mut save: impl FnMut(&mut DetachedLane, LaneRow) -> bool) {
        let mut postponed = HashSet::new();
        for key in std::mem::take(&mut self.dirty) {
            let Some(lane) = self.by_key.get_mut(&key) else { continue };
            let Some(detached) = &mut lane.detached else { continue };
            let row = LaneRow {
                head: lane.queue.front().map_or(detached.head, |first| first.n),
                lane: key.name().cloned(),
                attempts: lane.attempts,
                next_at: if lane.is_blocked { None } else { Some(lane.next_at.unwrap_or(now)) },
                manual_retry: lane.manual_retry,
            };
            if !save(detached, row) {
                postponed.insert(key);
            }
        }
        self.dirty = postponed;
    }
}

impl Lane {
    /// Whether the message `n` is the next one of this lane, in memory or still to be read.
    pub(super) fn has_head(&self, n: i64) -> bool {
        match (self.queue.front(), &self.detached) {
            (Some(first), _) => first.n == n,
            (None, Some(detached)) => detached.read_to == n - 1,
            (None, None) => false,
        }
    }
}

#[cfg(test)]
impl Lanes {
    /// Fails if a lane is scheduled twice, or if a count differs from what it counts.
    pub(super) fn check_invariants(&self) {
        let ready = self.ready.iter().chain(&self.ready_replays);
        let scheduled = ready.chain(self.due.iter().map(|(_, key)| key)).chain(&self.needs_read);
        let mut seen = HashSet::new();
        for key in scheduled {
            assert!(seen.insert(key), "{key:?} is scheduled twice");
            let lane = self.by_key.get(key);
            assert!(lane.is_none_or(|lane| !lane.is_in_flight), "{key:?} is scheduled while in flight");
            assert!(lane.is_none_or(|lane| !lane.is_blocked), "{key:?} is scheduled while blocked");
        }
        assert_eq!(self.queued, self.by_key.values().map(|lane| lane.queue.len()).sum::<usize>());
        let attached = self.by_key.values().filter(|lane| lane.detached.is_none());
        let pending: BTreeSet<i64> = attached.flat_map(|lane| lane.queue.iter().map(|message| message.n)).collect();
        assert_eq!(self.pending, pending, "the position waits for the messages of attached lanes, and for no others");
    }
}

#[cfg(test)]
mod tests;
