//! Backoff: how long to wait before the next attempt after repeated failures.
//!
//! [`Backoff`] computes an exponential pause; [`lengthen`] adds jitter to a pause of a fixed schedule. Randomness is a
//! parameter, so that a test can choose it.

use std::time::Duration;

/// The largest relative change that jitter makes to a pause.
const JITTER: f64 = 0.2;

/// An exponential backoff: the pause is `first` after the first failure and doubles with each further failure, up to
/// `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, max: Duration) -> Backoff {
        Backoff { first, max }
    }

    /// Returns the pause after `failures` consecutive failures. Treats 0 as 1.
    pub fn pause(&self, failures: u32) -> Duration {
        self.first.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(self.max)
    }

    /// Returns the pause, changed by up to 20 % in either direction, so that attempts which failed together are not
    /// repeated together. The result can exceed `max` by 20 %. `random` is uniform in 0..=1; other values are clamped.
    pub fn pause_with_jitter(&self, failures: u32, random: f64) -> Duration {
        let factor = 1.0 - JITTER + 2.0 * JITTER * random.clamp(0.0, 1.0);
        self.pause(failures).mul_f64(factor)
    }
}

/// Makes a pause of a fixed schedule up to 20 % longer, and never shorter. `random` is uniform in 0..=1; other values
/// are clamped.
pub fn lengthen(pause: Duration, random: f64) -> Duration {
    pause.mul_f64(1.0 + JITTER * random.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

    #[test]
    fn the_pause_doubles_up_to_its_maximum() {
        let millis = |failures| BACKOFF.pause(failures).as_millis();
        assert_eq!([1, 2, 3, 4, 7, 8, 9].map(millis), [100, 200, 400, 800, 6_400, 10_000, 10_000]);
        assert_eq!([0, 1_000, u32::MAX].map(millis), [100, 10_000, 10_000]);
    }

    #[test]
    fn a_first_pause_above_the_maximum_is_limited_to_it() {
        assert_eq!(Backoff::new(Duration::MAX, Duration::from_secs(1)).pause(5), Duration::from_secs(1));
    }

    #[test]
    fn jitter_changes_the_pause_by_a_fifth_in_either_direction() {
        let seconds = |random| BACKOFF.pause_with_jitter(8, random).as_secs_f64();
        for (random, expected) in [(0.0, 8.0), (0.25, 9.0), (0.5, 10.0), (1.0, 12.0), (-1.0, 8.0), (7.0, 12.0)] {
            assert!((seconds(random) - expected).abs() < 1e-6, "{random}: {}", seconds(random));
        }
    }

    #[test]
    fn a_lengthened_pause_is_never_shorter_than_scheduled() {
        let lengthened = |random| lengthen(Duration::from_secs(10), random);
        assert_eq!([0.0, 0.5, 1.0, -1.0, 7.0].map(lengthened), [10, 11, 12, 10, 12].map(Duration::from_secs));
    }
}
