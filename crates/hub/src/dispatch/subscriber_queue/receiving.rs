//! Messages into a subscriber queue: what it requests, and how it accepts messages.

use chrono::{DateTime, Utc};

use super::SubscriberQueue;
use super::lanes::LANE_MESSAGES_MAX;
use super::read_progress::MESSAGES_AHEAD_MAX;
use crate::delivery::{LaneReadRequest, QueueReadRequest};
use crate::hub_message::HubMessage;

/// The path on which messages reach a subscriber queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::dispatch) enum Origin {
    /// Fan-out in this process handed them over. They follow directly after the last message that the dispatcher has
    /// announced to its queues.
    HandedOver,
    /// They were read from the database behind the queue's read position; if `is_complete`, these are all there are.
    Read { is_complete: bool },
}

impl SubscriberQueue {
    /// The read that this queue needs, if there is more to read and memory for it.
    pub(in crate::dispatch) fn read_request(&self) -> Option<QueueReadRequest> {
        // While the breaker is open, more is read only if there is nothing else to probe with.
        let has_memory = match self.limits.is_breaker_open() {
            true => self.lanes.has_nothing_scheduled() && self.limits.in_flight() == 0,
            false => self.lanes.queued() <= self.progress.messages_max() / 4,
        };
        let needs_read = self.progress.has_more && !self.progress.is_reading && self.is_open() && has_memory;
        needs_read.then(|| QueueReadRequest {
            subscriber: self.recipient.id,
            after: self.progress.read_to,
            limit: self.progress.messages_max(),
        })
    }

    /// Like [`Self::read_request`], and marks the read as in flight.
    pub(in crate::dispatch) fn start_read(&mut self) -> Option<QueueReadRequest> {
        let request = self.read_request()?;
        self.progress.start_read();
        Some(request)
    }

    /// The read failed: the queue requests it again.
    pub(in crate::dispatch) fn fail_read(&mut self) {
        self.progress.fail_read();
    }

    /// The database has messages for this subscriber that the queue has not read.
    pub(in crate::dispatch) fn mark_has_more(&mut self) {
        self.progress.has_more = true;
    }

    /// Accepts messages from either path, in the order of their numbers. Both paths end here, so that a message is queued
    /// once however it came: `read_to` tells which numbers the queue already has.
    pub(in crate::dispatch) fn receive(&mut self, mut messages: Vec<HubMessage>, origin: Origin) {
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
        is_contiguous && self.lanes.queued() <= self.progress.messages_max() && self.is_open()
    }

    /// Starts reads for up to `lanes_max` detached lanes that cannot continue without.
    pub(in crate::dispatch) fn start_lane_reads(
        &mut self,
        now: DateTime<Utc>,
        lanes_max: usize,
    ) -> Vec<LaneReadRequest> {
        self.lanes.wake_due(now);
        let is_full = self.limits.in_flight() + self.lanes.ready_count() >= MESSAGES_AHEAD_MAX;
        if !self.is_open() || !self.lanes.needs_read() || is_full {
            return Vec::new();
        }
        let lanes_max = if self.limits.is_breaker_open() { 1 } else { lanes_max };
        let limit = self.progress.messages_max().min(LANE_MESSAGES_MAX);
        self.lanes.start_reads(lanes_max, limit, self.progress.read_to)
    }

    /// Accepts the messages that were read for a detached lane.
    pub(in crate::dispatch) fn receive_lane(&mut self, request: &LaneReadRequest, messages: Vec<HubMessage>) {
        self.progress.measure(&messages);
        self.lanes.finish_read(request, messages, self.progress.read_to);
    }

    /// The read for a detached lane failed: the lane requests it again.
    pub(in crate::dispatch) fn fail_lane_read(&mut self, request: LaneReadRequest) {
        self.lanes.fail_read(request);
    }
}
