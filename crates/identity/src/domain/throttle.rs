//! Limits on attempts. The attempts of two adjacent windows approximate a sliding window: those of the previous one count
//! less the more of the current one has passed. An attempt that is refused is not counted, so a user is locked out no
//! longer than it takes for the counted attempts to pass.

use chrono::{DateTime, TimeDelta, Utc};

/// At most this many attempts in the time. 0: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) attempts_max: u32,
    pub(crate) seconds: u32,
}

/// The attempts in the current window and in the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Attempts {
    pub(crate) current: i32,
    pub(crate) previous: i32,
}

impl Limit {
    /// The number of the window that contains the time.
    pub(crate) fn window_no(&self, now: DateTime<Utc>) -> i64 {
        now.timestamp().div_euclid(i64::from(self.seconds))
    }

    /// When the attempts of the current window no longer count.
    pub(crate) fn expires_at(&self, now: DateTime<Utc>) -> DateTime<Utc> {
        now + TimeDelta::seconds(2 * i64::from(self.seconds))
    }

    /// Returns how long to wait before another attempt; None if one is allowed now.
    pub(crate) fn wait(&self, attempts: Attempts, now: DateTime<Utc>) -> Option<TimeDelta> {
        if self.attempts_max == 0 {
            return None;
        }
        let (seconds, limit) = (f64::from(self.seconds), f64::from(self.attempts_max));
        let passed = now.timestamp_millis().rem_euclid(i64::from(self.seconds) * 1000) as f64 / 1000.0 / seconds;
        let (current, previous) = (f64::from(attempts.current), f64::from(attempts.previous));
        if previous * (1.0 - passed) + current <= limit - 1.0 {
            return None;
        }
        // The part of a window after which `counted` attempts weigh no more than `allowed`.
        let part = |counted: f64, allowed: f64| if counted > 0.0 { 1.0 - (allowed / counted).max(0.0) } else { 0.0 };
        let windows = if current <= limit - 1.0 {
            part(previous, limit - 1.0 - current) - passed
        } else {
            // They become those of the previous window first.
            1.0 - passed + part(current, limit - 1.0)
        };
        Some(TimeDelta::milliseconds((windows.max(0.0) * seconds * 1000.0).ceil() as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Limit = Limit { attempts_max: 10, seconds: 100 };

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_000_000 + seconds, 0).unwrap()
    }

    fn wait(current: i32, previous: i32, seconds: i64) -> Option<i64> {
        LIMIT.wait(Attempts { current, previous }, at(seconds)).map(|wait| wait.num_seconds())
    }

    #[test]
    fn attempts_are_allowed_up_to_the_limit_and_again_when_the_wait_has_passed() {
        assert_eq!(wait(9, 0, 0), None);
        assert_eq!(wait(10, 0, 0), Some(110), "a tenth of the next window must pass");
        assert_eq!(wait(0, 10, 9), Some(1));
        assert_eq!(wait(0, 10, 10), None);
        assert_eq!(wait(5, 10, 10), Some(50));
        assert_eq!(wait(5, 10, 60), None);
        assert_eq!(Limit { attempts_max: 0, ..LIMIT }.wait(Attempts { current: 99, previous: 99 }, at(0)), None);
    }

    #[test]
    fn a_stranger_who_never_stops_does_not_lock_for_ever() {
        // One request each second. Refused ones are not counted.
        let (mut counts, mut allowed) = (std::collections::HashMap::<i64, i32>::new(), Vec::new());
        for second in 0..1_000 {
            let window = LIMIT.window_no(at(second));
            let of = |window: i64| counts.get(&window).copied().unwrap_or(0);
            let attempts = Attempts { current: of(window), previous: of(window - 1) };
            if LIMIT.wait(attempts, at(second)).is_none() {
                *counts.entry(window).or_default() += 1;
                allowed.push(second);
            }
        }
        assert!((80..=110).contains(&allowed.len()), "{}", allowed.len());
        let longest = allowed.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
        assert!(longest <= 110, "{longest}");
    }
}
