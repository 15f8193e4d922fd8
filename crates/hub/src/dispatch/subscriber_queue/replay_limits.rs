//! The share that messages of replays have in sending to one subscriber.
//!
//! They leave room for live messages: they occupy at most three quarters of the requests in flight, and when they fail, live
//! messages do not wait.

use std::collections::HashSet;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::deliveries::message::LaneKey;

#[derive(Debug, Default)]
pub(super) struct ReplayLimits {
    /// The lane of each request, or the first one of a batch.
    in_flight: HashSet<LaneKey>,
    /// The end of the pause that the subscriber requested with `Retry-After` for a message of a replay.
    paused_until: Option<DateTime<Utc>>,
}

impl ReplayLimits {
    /// Whether one more message of a replay may be sent now, if the limits of the subscriber allow it.
    pub(super) fn allow(&self, max_in_flight: usize, now: DateTime<Utc>) -> bool {
        self.in_flight.len() < (max_in_flight * 3 / 4).max(1) && self.paused_until(now).is_none()
    }

    pub(super) fn start(&mut self, key: LaneKey) {
        self.in_flight.insert(key);
    }

    /// Returns whether the request was one of a replay.
    pub(super) fn finish(&mut self, key: &LaneKey) -> bool {
        self.in_flight.remove(key)
    }

    /// An attempt of a replay has failed, perhaps with a `Retry-After`.
    pub(super) fn pause(&mut self, pause: Option<Duration>, now: DateTime<Utc>) {
        if let Some(pause) = pause {
            self.paused_until = self.paused_until.max(Some(now + pause));
        }
    }

    pub(super) fn clear_pause(&mut self) {
        self.paused_until = None;
    }

    /// The end of the pause, if it is not over.
    pub(super) fn paused_until(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        self.paused_until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replays_use_three_quarters_of_the_requests_at_most() {
        let (mut limits, now) = (ReplayLimits::default(), DateTime::UNIX_EPOCH);
        (0..3).for_each(|n| limits.start(LaneKey::Single(n)));
        assert!(!limits.allow(4, now) && limits.allow(8, now));
        limits.finish(&LaneKey::Single(0));
        assert!(limits.allow(4, now));
        let mut limits = ReplayLimits::default();
        assert!(limits.allow(1, now), "a subscriber with one request at a time also has replays");
        limits.pause(Some(Duration::from_secs(9)), now);
        assert!(!limits.allow(4, now) && limits.allow(4, now + Duration::from_secs(9)));
    }
}
