//! How often, and after how long.

use std::time::Duration;

use rand::Rng;

/// Exponential, with jitter: what failed together does not come back together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// None: for ever.
    pub retries: Option<u32>,
    pub first: Duration,
    pub longest: Duration,
}

impl Retry {
    /// After so many attempts: when to try again, or None to give up.
    pub(crate) fn after(&self, attempts: i32) -> Option<Duration> {
        let failed = attempts.max(1) as u32;
        if self.retries.is_some_and(|retries| failed > retries) {
            return None;
        }
        let pause = self.first.saturating_mul(2u32.saturating_pow(failed - 1)).min(self.longest);
        Some(pause.mul_f64(rand::rng().random_range(0.8..1.2)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_retries_are_four_attempts_each_later_than_the_one_before() {
        let retry = Retry { retries: Some(3), first: Duration::from_secs(1), longest: Duration::from_secs(60) };
        let pauses: Vec<Duration> = (1..=3).map(|attempts| retry.after(attempts).unwrap()).collect();
        assert!(pauses.windows(2).all(|pair| pair[0] < pair[1]), "{pauses:?}");
        assert_eq!(retry.after(4), None);
    }

    #[test]
    fn for_ever_has_a_longest_pause() {
        let retry = Retry { retries: None, first: Duration::from_secs(1), longest: Duration::from_secs(60) };
        assert!(retry.after(1_000_000).unwrap() <= Duration::from_secs(72));
    }
}
