//! How long the leases of this process are certainly valid, by a clock that runs while the process is suspended.
//!
//! The fence protects the database: a process that lost its lease commits nothing. It cannot protect a receiver outside of
//! the database. So a process checks this clock before it sends anything: its last heartbeat was confirmed so recently that
//! no other process can have taken over yet.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use runtime::boot_time::BootTime;

/// The heartbeats of this process that the database has confirmed.
#[derive(Debug)]
pub(super) struct LeaseClock {
    lease_time: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// No other process can take over before this time.
    valid_until: Option<BootTime>,
    /// How often the leases may have expired between two heartbeats.
    lapses: u64,
}

/// The lease of a worker that owned its shards when it was checked in the database. A later heartbeat extends it, but only
/// if the lease did not expire before: another process may own the shards then, although this one sends heartbeats again.
#[derive(Debug, Clone)]
pub struct Lease {
    clock: Arc<LeaseClock>,
    lapses: u64,
}

impl LeaseClock {
    pub(super) fn new(lease_time: Duration) -> Arc<LeaseClock> {
        Arc::new(LeaseClock { lease_time, state: Mutex::new(State { valid_until: None, lapses: 0 }) })
    }

    /// The database has confirmed a heartbeat that was sent at `sent_at`, or later.
    pub(super) fn confirm(&self, sent_at: BootTime) {
        self.confirm_at(sent_at, BootTime::now());
    }

    fn confirm_at(&self, sent_at: BootTime, now: BootTime) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.valid_until.is_some_and(|until| now >= until) {
            state.lapses += 1;
        }
        state.valid_until = state.valid_until.max(Some(sent_at + self.lease_time));
    }

    /// Returns the lease of a worker. Call it before the database confirms that the worker owns its shards.
    pub(super) fn lease(self: &Arc<LeaseClock>) -> Lease {
        let lapses = self.state.lock().unwrap_or_else(PoisonError::into_inner).lapses;
        Lease { clock: self.clone(), lapses }
    }
}

impl Lease {
    /// Returns a lease of a process that sends one heartbeat now and no other one, for tests.
    pub fn of_one_heartbeat(lease_time: Duration) -> Lease {
        let clock = LeaseClock::new(lease_time);
        clock.confirm(BootTime::now());
        clock.lease()
    }

    /// Whether no other process can own the shards now. False does not mean that one does.
    pub fn is_valid(&self) -> bool {
        self.is_valid_at(BootTime::now())
    }

    fn is_valid_at(&self, now: BootTime) -> bool {
        let state = *self.clock.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.lapses == self.lapses && state.valid_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_lease_is_valid_until_its_time_after_the_last_confirmed_heartbeat() {
        let (clock, start) = (LeaseClock::new(SECOND * 10), BootTime::now());
        assert!(!clock.lease().is_valid_at(start), "no heartbeat was confirmed yet");
        clock.confirm_at(start, start + SECOND);
        let lease = clock.lease();
        assert!(lease.is_valid_at(start + SECOND * 9) && !lease.is_valid_at(start + SECOND * 10));
        clock.confirm_at(start + SECOND * 8, start + SECOND * 9);
        assert!(lease.is_valid_at(start + SECOND * 17) && !lease.is_valid_at(start + SECOND * 18));
    }

    #[test]
    fn a_heartbeat_after_the_lease_expired_does_not_revive_it() {
        let (clock, start) = (LeaseClock::new(SECOND * 10), BootTime::now());
        clock.confirm_at(start, start);
        let lease = clock.lease();
        // The process was suspended, and another one may have taken over. The heartbeat was sent before, but arrived late.
        clock.confirm_at(start + SECOND * 9, start + SECOND * 11);
        assert!(!lease.is_valid_at(start + SECOND * 12));
        assert!(clock.lease().is_valid_at(start + SECOND * 12), "a worker that joins again has a new lease");
    }
}
