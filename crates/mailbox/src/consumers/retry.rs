//! The retry policy: how often a failed message is retried, and after which delay.

use std::time::Duration;

use rand::Rng;

/// Exponential backoff with jitter, so that messages that failed together are not retried together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// None: without limit.
    pub retries: Option<u32>,
    /// The delay of the first retry. It doubles with each further one.
    pub first: Duration,
    /// The longest delay, before jitter.
    pub longest: Duration,
}

impl RetryPolicy {
    /// Returns the delay until the next attempt, or None if the message is given up after this many attempts.
    pub(super) fn delay_after(&self, attempts: i32) -> Option<Duration> {
        let failed = attempts.max(1) as u32;
        if self.retries.is_some_and(|retries| failed > retries) {
            return None;
        }
        let delay = self.first.saturating_mul(2u32.saturating_pow(failed - 1)).min(self.longest);
        Some(delay.mul_f64(rand::rng().random_range(0.8..1.2)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_retries_are_four_attempts_with_growing_delays() {
        let retry = RetryPolicy { retries: Some(3), first: Duration::from_secs(1), longest: Duration::from_secs(60) };
        let delays: Vec<Duration> = (1..=3).map(|attempts| retry.delay_after(attempts).unwrap()).collect();
        assert!(delays.windows(2).all(|pair| pair[0] < pair[1]), "{delays:?}");
        assert_eq!(retry.delay_after(4), None);
    }

    #[test]
    fn unlimited_retries_have_a_longest_delay() {
        let retry = RetryPolicy { retries: None, first: Duration::from_secs(1), longest: Duration::from_secs(60) };
        assert!(retry.delay_after(1_000_000).unwrap() <= Duration::from_secs(72));
    }
}
