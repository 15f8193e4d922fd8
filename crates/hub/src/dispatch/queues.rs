//! The subscriber queues of the owned shards, and which of them have something to do.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::changes::Changes;
use super::scheduler::{Activity, Scheduler};
use super::subscriber_queue::SubscriberQueue;
use crate::deliveries::recipient::Recipient;

#[derive(Default)]
pub(super) struct Queues {
    by_subscriber: HashMap<Uuid, SubscriberQueue>,
    scheduler: Scheduler,
}

/// What a change to the directory leads to.
#[derive(Default)]
pub(super) struct Updated {
    /// The recipients without a queue.
    pub(super) new: Vec<Arc<Recipient>>,
    /// The queues without a recipient. They no longer belong to the [`Queues`].
    pub(super) removed: Vec<SubscriberQueue>,
}

impl Queues {
    /// None if the subscriber belongs to another process, or was deleted.
    pub(super) fn get_mut(&mut self, subscriber: Uuid) -> Option<&mut SubscriberQueue> {
        self.by_subscriber.get_mut(&subscriber)
    }

    pub(super) fn insert(&mut self, queue: SubscriberQueue) {
        let id = queue.recipient.id;
        self.by_subscriber.insert(id, queue);
        self.scheduler.activate(id);
    }

    /// Updates the queues of these recipients, and removes those of all others.
    pub(super) fn update(&mut self, recipients: Vec<Arc<Recipient>>) -> Updated {
        let mut others: HashSet<Uuid> = self.by_subscriber.keys().copied().collect();
        let mut updated = Updated::default();
        for recipient in recipients {
            others.remove(&recipient.id);
            match self.by_subscriber.get_mut(&recipient.id) {
                Some(queue) => {
                    self.scheduler.activate(recipient.id);
                    queue.update_recipient(recipient);
                }
                None => updated.new.push(recipient),
            }
        }
        updated.removed = others.iter().filter_map(|subscriber| self.by_subscriber.remove(subscriber)).collect();
        updated
    }

    /// Drops all queues.
    pub(super) fn clear(&mut self) {
        self.by_subscriber.clear();
        self.scheduler.reset();
    }

    /// Makes the next round visit this queue.
    pub(super) fn activate(&mut self, subscriber: Uuid) {
        self.scheduler.activate(subscriber);
    }

    /// Activates the queues whose timers have fired.
    pub(super) fn activate_due(&mut self, now: DateTime<Utc>) {
        self.scheduler.activate_due(now);
    }

    pub(super) fn next_timer(&self) -> Option<DateTime<Utc>> {
        self.scheduler.next_timer()
    }

    /// Visits all active queues.
    pub(super) fn visit_active(&mut self, mut visit: impl FnMut(&mut SubscriberQueue)) {
        for subscriber in self.scheduler.active() {
            if let Some(queue) = self.by_subscriber.get_mut(subscriber) {
                visit(queue);
            }
        }
    }

    /// Visits the active queues in turns, until `visit` returns false: each call starts at another one.
    pub(super) fn visit_in_turn(&mut self, mut visit: impl FnMut(&mut SubscriberQueue) -> bool) {
        for subscriber in self.scheduler.next_turn() {
            if let Some(queue) = self.by_subscriber.get_mut(subscriber)
                && !visit(queue)
            {
                return;
            }
        }
    }

    /// The number of active queues with changes to save, at most `max`.
    pub(super) fn count_changed(&self, now: DateTime<Utc>, max: usize) -> usize {
        let queues = self.scheduler.active().filter_map(|subscriber| self.by_subscriber.get(subscriber));
        queues.filter(|queue| queue.has_changes(now)).take(max).count()
    }

    /// Moves the due changes of all active queues into `changes`.
    pub(super) fn drain_changes(&mut self, now: DateTime<Utc>, changes: &mut Changes) {
        self.visit_active(|queue| {
            if queue.has_changes(now) {
                queue.drain_changes(now, changes);
            }
        });
    }

    /// Moves everything that is not saved into `changes`.
    pub(super) fn drain_all(&mut self, now: DateTime<Utc>, changes: &mut Changes) {
        for queue in self.by_subscriber.values_mut() {
            queue.drain_changes(now, changes);
            queue.drain_health(changes);
        }
    }

    /// Sets timers, and deactivates the queues without anything to do.
    pub(super) fn deactivate_idle(&mut self, now: DateTime<Utc>) {
        let queues = &self.by_subscriber;
        self.scheduler.deactivate_idle(now, |subscriber| {
            let queue = queues.get(subscriber)?;
            // The result of an attempt in flight activates the queue, and so does a free slot for a queue that waits for one:
            // rounds do not visit the many queues of slow subscribers.
            let is_active = queue.has_unsaved_outcomes() || queue.has_changes(now) || queue.needs_read();
            Some(Activity { wake_at: queue.next_wake(now), is_active })
        });
    }
}

#[cfg(test)]
impl Queues {
    pub(super) fn remove(&mut self, subscriber: Uuid) -> Option<SubscriberQueue> {
        self.by_subscriber.remove(&subscriber)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &SubscriberQueue> {
        self.by_subscriber.values()
    }

    pub(super) fn active(&self) -> usize {
        self.scheduler.active().count()
    }
}
