//! Which subscriber queues the dispatcher has to check, now or at a given time.
//!
//! A dispatcher may own many thousand subscribers, of which few have something to do: each round visits the active ones only.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

/// The minimum time until a timer fires, so that a queue cannot keep the dispatcher in a busy loop.
const TIMER_PAUSE_MIN: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub(super) struct Scheduler {
    active: HashSet<Uuid>,
    /// When to check a subscriber queue that waits for a point in time.
    timers: BTreeSet<(DateTime<Utc>, Uuid)>,
    /// Counts rounds of reading. Each starts at another place in the set, so that none of the subscribers is always last.
    /// Their order changes when one becomes active, so the turns are not strictly equal.
    turn: usize,
}

/// Whether a subscriber queue stays active, and when it is checked next.
#[derive(Debug)]
pub(super) struct Activity {
    pub(super) wake_at: Option<DateTime<Utc>>,
    pub(super) is_active: bool,
}

impl Scheduler {
    pub(super) fn activate(&mut self, subscriber: Uuid) {
        self.active.insert(subscriber);
    }

    /// Activates the subscriber queues whose timers have fired.
    pub(super) fn activate_due(&mut self, now: DateTime<Utc>) {
        while let Some((at, subscriber)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            self.active.insert(subscriber);
        }
    }

    pub(super) fn next_timer(&self) -> Option<DateTime<Utc>> {
        self.timers.first().map(|(at, _)| *at)
    }

    pub(super) fn active(&self) -> impl Iterator<Item = &Uuid> {
        self.active.iter()
    }

    /// All active subscribers. Each call starts at the next one; the order changes when a subscriber becomes active.
    pub(super) fn next_turn(&mut self) -> impl Iterator<Item = &Uuid> {
        self.turn = self.turn.wrapping_add(1);
        let from = self.turn % self.active.len().max(1);
        self.active.iter().skip(from).chain(self.active.iter().take(from))
    }

    /// Sets timers and deactivates the subscriber queues without anything to do. `activity` returns None for a subscriber
    /// that no longer has a queue.
    pub(super) fn deactivate_idle(&mut self, now: DateTime<Utc>, activity: impl Fn(&Uuid) -> Option<Activity>) {
        let timers = &mut self.timers;
        self.active.retain(|subscriber| {
            let Some(activity) = activity(subscriber) else { return false };
            if let Some(at) = activity.wake_at {
                timers.insert((at.max(now + TIMER_PAUSE_MIN), *subscriber));
            }
            activity.is_active
        });
    }

    /// Drops all subscribers.
    pub(super) fn reset(&mut self) {
        self.active.clear();
        self.timers.clear();
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    fn now() -> DateTime<Utc> {
        DateTime::<Utc>::UNIX_EPOCH + TimeDelta::days(20_000)
    }

    fn with_active(count: usize) -> (Scheduler, Vec<Uuid>) {
        let (mut scheduler, ids) = (Scheduler::default(), (0..count).map(|_| Uuid::now_v7()).collect::<Vec<_>>());
        ids.iter().for_each(|id| scheduler.activate(*id));
        (scheduler, ids)
    }

    #[test]
    fn an_idle_queue_is_checked_again_when_its_timer_fires() {
        let (mut scheduler, ids) = with_active(2);
        let at = now() + TimeDelta::seconds(5);
        scheduler.deactivate_idle(now(), |id| {
            Some(Activity { wake_at: (*id == ids[0]).then_some(at), is_active: *id == ids[1] })
        });
        assert_eq!(scheduler.active().collect::<Vec<_>>(), [&ids[1]]);
        assert_eq!(scheduler.next_timer(), Some(at));
        scheduler.activate_due(at - TimeDelta::milliseconds(1));
        assert_eq!(scheduler.active().count(), 1);
        scheduler.activate_due(at);
        assert_eq!((scheduler.active().count(), scheduler.next_timer()), (2, None));
    }

    #[test]
    fn a_timer_in_the_past_fires_a_little_later() {
        let (mut scheduler, _) = with_active(1);
        scheduler.deactivate_idle(now(), |_| Some(Activity { wake_at: Some(now()), is_active: false }));
        assert_eq!(scheduler.next_timer(), Some(now() + TIMER_PAUSE_MIN));
    }

    #[test]
    fn a_subscriber_without_a_queue_is_deactivated() {
        let (mut scheduler, _) = with_active(3);
        scheduler.deactivate_idle(now(), |_| None);
        assert_eq!((scheduler.active().count(), scheduler.next_timer()), (0, None));
    }

    #[test]
    fn every_subscriber_is_first_once_in_as_many_turns() {
        let (mut scheduler, ids) = with_active(10);
        let mut first = HashSet::new();
        for _ in 0..10 {
            let turn: Vec<Uuid> = scheduler.next_turn().copied().collect();
            assert_eq!(turn.iter().collect::<HashSet<_>>().len(), 10, "all of them, each once");
            first.insert(turn[0]);
        }
        assert_eq!(first, ids.into_iter().collect());
    }
}
