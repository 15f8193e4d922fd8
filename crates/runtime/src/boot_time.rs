//! The time since the machine started. Unlike `std::time::Instant` it also passes while the machine sleeps.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A point in time of this machine. This clock cannot be set, and it does not stop: not for a suspended process, and not
/// for a machine that sleeps. Only a virtual machine that its host has frozen may not notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    pub fn now() -> BootTime {
        // Linux always has the clock. Without it, the time is so late that no lease counts as valid.
        BootTime(clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from))
    }
}

impl std::ops::Add<Duration> for BootTime {
    type Output = BootTime;

    fn add(self, time: Duration) -> BootTime {
        BootTime(self.0.saturating_add(time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_passes() {
        let before = BootTime::now();
        std::thread::sleep(Duration::from_millis(2));
        assert!(before + Duration::from_millis(1) < BootTime::now());
        assert!(BootTime::now() < before + Duration::from_secs(3_600));
    }
}
