//! The retry policy: how often a failed message is retried, and after which delay.

use std::time::Duration;

use runtime::backoff::Backoff;
use uuid::Uuid;

/// Exponential backoff with jitter, so that messages that failed together are not retried together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// None: without limit. `Some(0)`: a message is given up at its first failure.
    pub retries: Option<u32>,
    /// The delays between attempts, before jitter.
    pub backoff: Backoff,
}

impl RetryPolicy {
    /// Returns the delay until the next attempt, or None if the message is given up after this many attempts.
    pub(super) fn delay_after(&self, attempts: i32) -> Option<Duration> {
        let failures = attempts.max(1) as u32;
        let is_exhausted = self.retries.is_some_and(|retries| failures > retries);
        (!is_exhausted).then(|| self.backoff.pause_with_jitter(failures, random()))
    }
}

/// A random number in 0..=1.
fn random() -> f64 {
    let (_, low) = Uuid::new_v4().as_u64_pair();
    f64::from(low as u32) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

    #[test]
    fn three_retries_are_four_attempts_with_growing_delays() {
        let retry = RetryPolicy { retries: Some(3), backoff: BACKOFF };
        let delays: Vec<Duration> = (1..=3).map(|attempts| retry.delay_after(attempts).unwrap()).collect();
        assert!(delays.windows(2).all(|pair| pair[0] < pair[1]), "{delays:?}");
        assert_eq!(retry.delay_after(4), None);
    }

    #[test]
    fn a_message_without_retries_is_given_up_at_its_first_failure() {
        assert_eq!(RetryPolicy { retries: Some(0), backoff: BACKOFF }.delay_after(1), None);
    }

    #[test]
    fn unlimited_retries_have_a_longest_delay() {
        let retry = RetryPolicy { retries: None, backoff: BACKOFF };
        assert!(retry.delay_after(1_000_000).unwrap() <= Duration::from_secs(72));
    }
}
