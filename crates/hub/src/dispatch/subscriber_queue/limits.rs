//! The limits of sending to one subscriber: messages in flight, rate, `Retry-After` and circuit breaker.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::deliveries::domain::Verdict;
use crate::deliveries::recipient::RecipientLimits;

/// Failures in a row after which the breaker opens: then one message is tried at a time.
const BREAKER_FAILURES: u32 = 20;
/// While the breaker is open, the minimum time between two attempts.
const PROBE_PAUSE: Duration = Duration::from_millis(500);
/// A subscriber is slow if its attempts take longer than this.
const SLOW_AFTER: Duration = Duration::from_secs(1);
/// The weight of the last attempt in the average time of attempts.
const LAST_WEIGHT: f64 = 0.2;

#[derive(Debug)]
pub(super) struct Limits {
    in_flight: usize,
    /// Failed attempts since the last success.
    failures: u32,
    probe_at: Option<DateTime<Utc>>,
    /// The end of the pause that the subscriber requested with `Retry-After`.
    paused_until: Option<DateTime<Utc>>,
    tokens: TokenBucket,
    /// The average time of the last attempts, in seconds. None: no attempt has finished yet.
    average_seconds: Option<f64>,
    /// Since when attempts are in flight without one that has finished.
    in_flight_since: Option<DateTime<Utc>>,
}

/// A token bucket for the rate limit. Its size is a tenth of a second's messages, at least one.
#[derive(Debug)]
struct TokenBucket {
    tokens: f64,
    refilled_at: DateTime<Utc>,
}

impl Limits {
    pub(super) fn new(now: DateTime<Utc>) -> Limits {
        let tokens = TokenBucket { tokens: 0.0, refilled_at: now };
        Limits {
            in_flight: 0,
            failures: 0,
            probe_at: None,
            paused_until: None,
            tokens,
            average_seconds: None,
            in_flight_since: None,
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn is_breaker_open(&self) -> bool {
        self.failures >= BREAKER_FAILURES
    }

    /// Whether attempts take long, or none has finished yet.
    pub(super) fn is_slow(&self, now: DateTime<Utc>) -> bool {
        let has_slow_answers = self.average_seconds.is_none_or(|seconds| seconds > SLOW_AFTER.as_secs_f64());
        has_slow_answers || self.in_flight_since.is_some_and(|since| now > since + SLOW_AFTER)
    }

    /// Whether one more message may be sent now.
    pub(super) fn allow(&mut self, limits: &RecipientLimits, now: DateTime<Utc>) -> bool {
        if self.paused_until.is_some_and(|until| until > now) {
            return false;
        }
        let in_flight_max = if self.is_breaker_open() { 1 } else { limits.max_in_flight };
        let waits_for_probe = self.is_breaker_open() && self.probe_at.is_some_and(|at| at > now);
        if self.in_flight >= in_flight_max || waits_for_probe {
            return false;
        }
        limits.rate.is_none_or(|rate| self.tokens.has_one(rate, now))
    }

    /// Counts a message that is being sent.
    pub(super) fn start_attempt(&mut self, limits: &RecipientLimits, now: DateTime<Utc>) {
        self.in_flight += 1;
        self.in_flight_since.get_or_insert(now);
        // Without a rate the bucket is not refilled, so nothing is taken from it: a rate that is set later must not start
        // with a debt.
        if limits.rate.is_some() {
            self.tokens.tokens -= 1.0;
        }
        if self.is_breaker_open() {
            self.probe_at = Some(now + PROBE_PAUSE);
        }
    }

    pub(super) fn finish_attempt(&mut self, now: DateTime<Utc>) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.in_flight_since = (self.in_flight > 0).then_some(now);
    }

    /// Updates the average time of attempts.
    pub(super) fn record_time(&mut self, time: Duration) {
        let last = time.as_secs_f64();
        let average = self.average_seconds.unwrap_or(last);
        self.average_seconds = Some(average + (last - average) * LAST_WEIGHT);
    }

    /// Updates breaker and pause with the result of an attempt. `pause` is the `Retry-After` of a failed attempt.
    pub(super) fn record(&mut self, verdict: Verdict, pause: Option<Duration>, now: DateTime<Utc>) {
        match verdict {
            Verdict::Delivered => (self.failures, self.probe_at) = (0, None),
            Verdict::Retry => self.failures = self.failures.saturating_add(1),
            Verdict::Refused | Verdict::Gone => {}
        }
        if let Some(pause) = pause {
            self.paused_until = self.paused_until.max(Some(now + pause));
        }
    }

    /// The subscriber has changed, perhaps its address: a pause requested by the old one no longer applies.
    pub(super) fn clear_pause(&mut self) {
        self.paused_until = None;
    }

    /// The time when all time-based limits (pause, probe, rate) have ended. None if there is none: then only the limit of
    /// messages in flight applies, and the queue waits for the result of an attempt.
    pub(super) fn next_allowed_at(&self, limits: &RecipientLimits, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let rate = limits.rate.filter(|_| self.tokens.tokens < 1.0);
        let next_token = rate.map(|rate| now + Duration::from_secs_f64(1.0 / f64::from(rate)));
        let probe = self.probe_at.filter(|_| self.is_breaker_open());
        [self.paused_until, probe, next_token].into_iter().flatten().filter(|at| *at > now).max()
    }
}

impl TokenBucket {
    fn has_one(&mut self, rate: u32, now: DateTime<Utc>) -> bool {
        let elapsed = (now - self.refilled_at).to_std().unwrap_or_default().as_secs_f64();
        let size = (f64::from(rate) / 10.0).max(1.0);
        self.tokens = (self.tokens + elapsed * f64::from(rate)).min(size);
        self.refilled_at = now;
        self.tokens >= 1.0
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    const UNLIMITED: RecipientLimits = RecipientLimits { max_in_flight: 100, rate: None };

    fn now() -> DateTime<Utc> {
        DateTime::<Utc>::UNIX_EPOCH + TimeDelta::days(20_000)
    }

    #[test]
    fn no_more_than_the_maximum_is_in_flight() {
        let (mut limits, two) = (Limits::new(now()), RecipientLimits { max_in_flight: 2, rate: None });
        for _ in 0..2 {
            assert!(limits.allow(&two, now()));
            limits.start_attempt(&two, now());
        }
        assert!(!limits.allow(&two, now()));
        limits.finish_attempt(now());
        assert!(limits.allow(&two, now()));
    }

    #[test]
    fn the_breaker_opens_after_twenty_failures_and_a_success_closes_it() {
        let mut limits = Limits::new(now());
        for _ in 0..BREAKER_FAILURES {
            assert!(!limits.is_breaker_open());
            limits.record(Verdict::Retry, None, now());
        }
        assert!(limits.is_breaker_open() && limits.allow(&UNLIMITED, now()));
        limits.start_attempt(&UNLIMITED, now());
        assert!(!limits.allow(&UNLIMITED, now() + TimeDelta::seconds(1)), "one at a time");
        limits.finish_attempt(now());
        assert!(!limits.allow(&UNLIMITED, now()), "not before the pause is over");
        assert_eq!(limits.next_allowed_at(&UNLIMITED, now()), Some(now() + PROBE_PAUSE));
        assert!(limits.allow(&UNLIMITED, now() + PROBE_PAUSE));
        limits.record(Verdict::Delivered, None, now());
        assert!(!limits.is_breaker_open() && limits.allow(&UNLIMITED, now()));
    }

    #[test]
    fn refused_messages_do_not_open_the_breaker() {
        let mut limits = Limits::new(now());
        (0..100).for_each(|_| limits.record(Verdict::Refused, None, now()));
        assert!(!limits.is_breaker_open());
    }

    #[test]
    fn the_longest_requested_pause_applies_until_the_subscriber_changes() {
        let mut limits = Limits::new(now());
        for seconds in [7, 3] {
            limits.record(Verdict::Retry, Some(Duration::from_secs(seconds)), now());
        }
        let end = now() + TimeDelta::seconds(7);
        assert_eq!(limits.next_allowed_at(&UNLIMITED, now()), Some(end));
        assert!(!limits.allow(&UNLIMITED, end - TimeDelta::milliseconds(1)) && limits.allow(&UNLIMITED, end));
        limits.clear_pause();
        assert!(limits.allow(&UNLIMITED, now()));
    }

    #[test]
    fn a_rate_limit_allows_a_burst_of_a_tenth_of_a_second() {
        let limited = RecipientLimits { max_in_flight: 1_000, rate: Some(100) };
        let (mut limits, later) = (Limits::new(now()), now() + TimeDelta::seconds(5));
        let mut sent = 0;
        while limits.allow(&limited, later) {
            limits.start_attempt(&limited, later);
            sent += 1;
        }
        assert_eq!(sent, 10);
        assert_eq!(limits.next_allowed_at(&limited, later), Some(later + TimeDelta::milliseconds(10)));
    }

    #[test]
    fn messages_sent_without_a_rate_do_not_count_when_one_is_set_later() {
        let limited = RecipientLimits { max_in_flight: 100, rate: Some(10) };
        let mut limits = Limits::new(now());
        for _ in 0..100_000 {
            assert!(limits.allow(&UNLIMITED, now()));
            limits.start_attempt(&UNLIMITED, now());
            limits.finish_attempt(now());
        }
        assert!(limits.allow(&limited, now() + TimeDelta::milliseconds(100)), "one token after a tenth of a second");
    }

    #[test]
    fn a_subscriber_is_slow_until_it_answers_and_while_it_needs_seconds() {
        let (mut limits, later) = (Limits::new(now()), now() + TimeDelta::milliseconds(1_001));
        assert!(limits.is_slow(now()), "nothing is known about it");
        limits.record_time(Duration::from_millis(50));
        assert!(!limits.is_slow(now()));
        limits.start_attempt(&UNLIMITED, now());
        limits.start_attempt(&UNLIMITED, later);
        assert!(!limits.is_slow(now()) && limits.is_slow(later), "an attempt in flight takes more than a second");
        limits.finish_attempt(later);
        assert!(!limits.is_slow(later), "another has just finished");
        limits.record_time(Duration::from_secs(10));
        assert!(limits.is_slow(later));
        (0..15).for_each(|_| limits.record_time(Duration::from_millis(50)));
        assert!(!limits.is_slow(later), "it has recovered");
    }
}
