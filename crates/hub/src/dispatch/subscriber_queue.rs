//! The in-memory state of one subscriber while this process sends to it.
//!
//! A subscriber queue decides which message is sent next and what the result of an attempt leads to. It performs no I/O and
//! gets the time as a parameter. The module documentation of `dispatch` describes the states of messages and lanes.
//!
//! The parts, each in its own file: [`Lanes`] (order), [`Limits`] (rate, breaker, in flight), [`ReadProgress`] (how far it
//! has read), [`UnsavedChanges`] (what the database does not have yet) and [`Commands`] (of operators). The remaining files
//! add the operations that involve several parts: `receiving` (messages in), `completion` (results in).

mod commands;
mod completion;
mod lanes;
mod limits;
mod read_progress;
mod receiving;
mod unsaved;

use std::sync::Arc;

use chrono::{DateTime, Utc};

use self::commands::Commands;
use self::lanes::Lanes;
use self::limits::Limits;
use self::read_progress::ReadProgress;
pub(super) use self::receiving::Origin;
use self::unsaved::UnsavedChanges;
use crate::delivery::{Recipient, StoredState};
use crate::hub_message::{HubMessage, LaneKey};

pub(super) struct SubscriberQueue {
    pub(super) recipient: Arc<Recipient>,
    /// Distinguishes this queue from earlier ones of the same subscriber: the result of an attempt that an earlier queue
    /// started is ignored.
    pub(super) generation: u64,
    /// The subscriber answered 410: nothing is sent until it changes.
    answered_gone: bool,
    lanes: Lanes,
    limits: Limits,
    progress: ReadProgress,
    unsaved: UnsavedChanges,
    commands: Commands,
}

impl SubscriberQueue {
    pub(super) fn new(recipient: Arc<Recipient>, generation: u64, stored: StoredState, now: DateTime<Utc>) -> Self {
        SubscriberQueue {
            recipient,
            generation,
            answered_gone: false,
            lanes: Lanes::new(stored.lanes, stored.completed, now),
            limits: Limits::new(now),
            progress: ReadProgress::new(stored.position),
            unsaved: UnsavedChanges::new(stored.position, now),
            commands: Commands::new(),
        }
    }

    /// Whether anything may be sent at all.
    fn is_open(&self) -> bool {
        self.recipient.is_open && !self.answered_gone
    }

    /// True if the database has everything that this queue knows.
    pub(super) fn is_idle(&self) -> bool {
        self.limits.in_flight() == 0 && !self.unsaved.has_outcomes() && !self.lanes.is_dirty()
    }

    /// Whether the queue could continue if messages or commands were read for it.
    pub(super) fn needs_read(&self) -> bool {
        self.commands.need_read || self.read_request().is_some() || (self.lanes.needs_read() && self.is_open())
    }

    pub(super) fn in_flight(&self) -> usize {
        self.limits.in_flight()
    }

    /// Marks the next message as in flight and returns it. None if no message may be sent now.
    pub(super) fn start_next(&mut self, now: DateTime<Utc>) -> Option<(LaneKey, HubMessage)> {
        self.lanes.wake_due(now);
        if !self.lanes.has_ready() || !self.is_open() || !self.limits.allow(&self.recipient.limits, now) {
            return None;
        }
        let started = self.lanes.start_next()?;
        self.limits.start_attempt(now);
        Some(started)
    }

    /// When the dispatcher has to check this queue again if nothing else happens before.
    pub(super) fn next_wake(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let save = self.next_save();
        if !self.is_open() {
            return save;
        }
        let allowed = self.limits.next_allowed_at(&self.recipient.limits, now).filter(|_| self.lanes.has_ready());
        [self.lanes.next_due(), allowed, save].into_iter().flatten().min()
    }

    /// The owner of the subscriber has changed it.
    pub(super) fn update_recipient(&mut self, recipient: Arc<Recipient>) {
        if recipient.version != self.recipient.version {
            self.answered_gone = false;
            self.limits.clear_pause();
        }
        self.recipient = recipient;
    }
}

#[cfg(test)]
mod tests;
