//! The health of subscribers: what their attempts led to in each minute, and how long the responses took.
//!
//! The dispatcher that owns a subscriber counts in memory, and saves a row when the minute is over, together with the outcomes
//! of attempts. A subscriber without attempts costs nothing. The rows of a minute are written within the [`SPREAD_MAX`] seconds
//! after it, so that those of many subscribers are not written at once; a dispatcher that crashes loses what it has not
//! written.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::deliveries::attempt_result::AttemptResult;
use crate::deliveries::domain::Outcome;

/// The upper ends of the ranges of response times, in milliseconds; the last range has none. Rows are stored with these ranges,
/// so they must never change.
const RANGES_MS: [u32; 24] = [
    1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000,
    30_000,
];
pub(crate) const RANGES: usize = RANGES_MS.len() + 1;
/// How many times are in each range.
pub(crate) type Histogram = [i64; RANGES];
/// The longest response time: the time limit of an attempt.
const LONGEST_MS: f64 = 60_000.0;
/// Within how many seconds after a minute its rows are saved.
const SPREAD_MAX: u128 = 10;
/// The minimum time between two saves of the state of a subscriber: one that fails every other time would cause one per attempt.
const STATE_PAUSE: TimeDelta = TimeDelta::seconds(1);
const MINUTE: TimeDelta = TimeDelta::minutes(1);

/// The attempts of one subscriber in some time.
#[derive(Debug, Clone, Default, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct AttemptCounts {
    pub(crate) delivered: i64,
    /// Failed, and retried.
    pub(crate) failed: i64,
    /// Failed, and given up.
    pub(crate) dead: i64,
    /// Requests per range of response times.
    #[sqlx(try_from = "Vec<i64>")]
    pub(crate) latency: Histogram,
}

/// The attempts of a subscriber that ended in one minute, to be added to its row.
#[derive(Debug)]
pub(crate) struct HealthMinute {
    pub(crate) subscriber: Uuid,
    /// The start of the minute.
    pub(crate) at: DateTime<Utc>,
    pub(crate) counts: AttemptCounts,
}

/// Whether the last attempts of a subscriber failed.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct SubscriberState {
    pub(crate) subscriber: Uuid,
    pub(crate) failing_since: Option<DateTime<Utc>>,
    pub(crate) is_breaker_open: bool,
}

/// What counts have become due, to be saved.
#[derive(Debug, Default)]
pub(crate) struct HealthChanges {
    pub(crate) minutes: Vec<HealthMinute>,
    pub(crate) states: Vec<SubscriberState>,
}

impl HealthChanges {
    pub(crate) fn is_empty(&self) -> bool {
        self.minutes.is_empty() && self.states.is_empty()
    }
}

/// The response times below which 50, 95 and 99 percent of the responses arrived, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, ToSchema)]
#[schema(as = LatencyPercentiles)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
}

impl AttemptCounts {
    pub(crate) fn record(&mut self, outcome: Outcome, result: &AttemptResult) {
        match outcome {
            Outcome::Delivered => self.delivered += 1,
            Outcome::Failed => self.failed += 1,
            Outcome::Dead | Outcome::Pending | Outcome::Filtered | Outcome::Inactive => self.dead += 1,
        }
        // A connection that is refused takes no time, and says nothing about responses.
        if result.status.is_some() {
            self.latency[range_of(result.latency)] += 1;
        }
    }

    pub(crate) fn add(&mut self, other: &AttemptCounts) {
        self.delivered += other.delivered;
        self.failed += other.failed;
        self.dead += other.dead;
        self.latency.iter_mut().zip(other.latency).for_each(|(sum, count)| *sum += count);
    }

    pub(crate) fn attempts(&self) -> i64 {
        self.delivered + self.failed + self.dead
    }

    /// The part of the attempts that succeeded; None without attempts.
    pub(crate) fn success_rate(&self) -> Option<f64> {
        (self.attempts() > 0).then(|| self.delivered as f64 / self.attempts() as f64)
    }

    /// Those of the response times. None without attempts.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        percentiles(&self.latency)
    }
}

/// None if the histogram is empty.
pub(crate) fn percentiles(times: &Histogram) -> Option<Percentiles> {
    let at = |share: f64| percentile(times, share);
    Some(Percentiles { p50: at(0.5)?, p95: at(0.95)?, p99: at(0.99)? })
}

/// Interpolates within the range that contains the percentile.
fn percentile(times: &Histogram, share: f64) -> Option<f64> {
    let total: i64 = times.iter().sum();
    if total == 0 {
        return None;
    }
    let (wanted, mut before) = (share * total as f64, 0.0);
    for (at, count) in times.iter().enumerate().filter(|(_, count)| **count > 0) {
        let until = before + *count as f64;
        if until >= wanted {
            let low = if at == 0 { 0.0 } else { f64::from(RANGES_MS[at - 1]) };
            let high = RANGES_MS.get(at).map_or(LONGEST_MS, |high| f64::from(*high));
            let value = low + (high - low) * (wanted - before) / *count as f64;
            return Some((value * 10.0).round() / 10.0);
        }
        before = until;
    }
    Some(LONGEST_MS)
}

/// The range of a time.
pub(crate) fn range_of(latency: Duration) -> usize {
    // The upper end belongs to the range.
    RANGES_MS.partition_point(|end| Duration::from_millis(u64::from(*end)) < latency)
}

/// What the queue of a subscriber counts.
#[derive(Debug, Default)]
pub(crate) struct HealthCounts {
    /// By the start of the minute, oldest first. At most two: saves are frequent.
    minutes: Vec<(DateTime<Utc>, AttemptCounts)>,
    failing_since: Option<DateTime<Utc>>,
    is_breaker_open: bool,
    /// The state that the database has (failing, breaker open), and when it was saved. None: unknown.
    saved: Option<((bool, bool), DateTime<Utc>)>,
    has_attempts: bool,
}

impl HealthCounts {
    /// Since when attempts fail; None if the last one succeeded.
    pub(crate) fn failing_since(&self) -> Option<DateTime<Utc>> {
        self.failing_since
    }

    /// Counts an attempt. A message that was given up without a request says nothing about the subscriber.
    pub(crate) fn record(
        &mut self,
        outcome: Outcome,
        result: &AttemptResult,
        is_breaker_open: bool,
        now: DateTime<Utc>,
    ) {
        if result.not_sent.is_some() {
            return;
        }
        self.failing_since = match outcome {
            Outcome::Delivered => None,
            Outcome::Failed | Outcome::Dead | Outcome::Pending | Outcome::Filtered | Outcome::Inactive => {
                Some(self.failing_since.unwrap_or(now))
            }
        };
        (self.is_breaker_open, self.has_attempts) = (is_breaker_open, true);
        let start = minute_of(now);
        match self.minutes.last_mut() {
            // A clock that is set back does not open an earlier minute.
            Some((at, counts)) if *at >= start => counts.record(outcome, result),
            _ => {
                let mut counts = AttemptCounts::default();
                counts.record(outcome, result);
                self.minutes.push((start, counts));
            }
        }
    }

    /// When something is to be saved; None if there is nothing.
    pub(crate) fn next_save(&self, subscriber: Uuid) -> Option<DateTime<Utc>> {
        let minute = self.minutes.first().map(|(at, _)| due_at(*at, subscriber));
        let is_changed = self.has_attempts && self.saved.is_none_or(|(saved, _)| saved != self.state());
        let state = is_changed.then(|| self.saved.map_or(DateTime::<Utc>::MIN_UTC, |(_, at)| at + STATE_PAUSE));
        [minute, state].into_iter().flatten().min()
    }

    fn state(&self) -> (bool, bool) {
        (self.failing_since.is_some(), self.is_breaker_open)
    }

    /// Moves what is due into `changes`.
    pub(crate) fn drain(&mut self, subscriber: Uuid, now: DateTime<Utc>, changes: &mut HealthChanges) {
        let due = self.minutes.iter().take_while(|(at, _)| due_at(*at, subscriber) <= now).count();
        let minutes = self.minutes.drain(..due);
        changes.minutes.extend(minutes.map(|(at, counts)| HealthMinute { subscriber, at, counts }));
        let is_recent = self.saved.is_some_and(|(saved, at)| saved == self.state() || now < at + STATE_PAUSE);
        if self.has_attempts && !is_recent {
            self.saved = Some((self.state(), now));
            let (failing_since, is_breaker_open) = (self.failing_since, self.is_breaker_open);
            changes.states.push(SubscriberState { subscriber, failing_since, is_breaker_open });
        }
    }

    /// Moves all counts into `changes`.
    pub(crate) fn drain_all(&mut self, subscriber: Uuid, changes: &mut HealthChanges) {
        let minutes = self.minutes.drain(..);
        changes.minutes.extend(minutes.map(|(at, counts)| HealthMinute { subscriber, at, counts }));
    }
}

fn minute_of(at: DateTime<Utc>) -> DateTime<Utc> {
    let seconds = at.timestamp();
    DateTime::from_timestamp(seconds - seconds.rem_euclid(60), 0).unwrap_or(at)
}

/// When the counts of a minute are saved: after its end, at another time for each subscriber.
fn due_at(minute: DateTime<Utc>, subscriber: Uuid) -> DateTime<Utc> {
    minute + MINUTE + TimeDelta::milliseconds((subscriber.as_u128() % (SPREAD_MAX * 1_000)) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deliveries::domain::{Reason, Verdict};

    fn start() -> DateTime<Utc> {
        DateTime::<Utc>::UNIX_EPOCH + TimeDelta::days(20_000)
    }

    fn answered(ms: u64) -> AttemptResult {
        let result = AttemptResult::not_sent(Reason::Manual, "");
        let (status, latency) = (Some(200), Duration::from_millis(ms));
        AttemptResult { verdict: Verdict::Delivered, status, latency, not_sent: None, ..result }
    }

    #[test]
    fn a_minute_is_saved_once_after_its_end_and_nothing_for_a_minute_without_attempts() {
        let (mut counts, subscriber) = (HealthCounts::default(), Uuid::from_u128(3_000));
        assert_eq!(counts.next_save(subscriber), None);
        for seconds in [0, 59, 61] {
            counts.record(Outcome::Delivered, &answered(5), false, start() + TimeDelta::seconds(seconds));
        }
        let mut changes = HealthChanges::default();
        counts.drain(subscriber, start() + TimeDelta::seconds(62), &mut changes);
        assert_eq!((changes.minutes.len(), changes.states.len()), (0, 1), "3 seconds after the minute");
        assert_eq!(counts.next_save(subscriber), Some(start() + TimeDelta::seconds(63)));
        counts.drain(subscriber, start() + TimeDelta::seconds(63), &mut changes);
        assert_eq!((changes.minutes.len(), changes.minutes[0].at), (1, start()));
        assert_eq!((changes.minutes[0].counts.delivered, changes.minutes[0].counts.latency[3]), (2, 2));
        counts.drain_all(subscriber, &mut changes);
        assert_eq!((changes.minutes.len(), changes.minutes[1].at), (2, start() + MINUTE));
        assert_eq!((changes.states.len(), counts.next_save(subscriber)), (1, None), "idle from now on");
    }

    #[test]
    fn an_attempt_without_a_response_has_no_response_time() {
        let mut counts = AttemptCounts::default();
        counts.record(Outcome::Failed, &AttemptResult { status: None, ..answered(1) });
        assert_eq!((counts.failed, counts.percentiles()), (1, None));
    }

    #[test]
    fn the_state_is_saved_when_it_changes_at_most_once_a_second() {
        let (mut counts, subscriber, mut changes) = (HealthCounts::default(), Uuid::nil(), HealthChanges::default());
        for tenth in 0..40 {
            let now = start() + TimeDelta::milliseconds(tenth * 100);
            let outcome = if tenth % 2 == 0 { Outcome::Failed } else { Outcome::Delivered };
            counts.record(outcome, &answered(5), false, now);
            counts.drain(subscriber, now, &mut changes);
        }
        assert_eq!(changes.states.len(), 4);
        assert_eq!(changes.states[0].failing_since, Some(start()));
        counts.record(Outcome::Dead, &AttemptResult::not_sent(Reason::Manual, ""), false, start());
        assert_eq!(counts.failing_since(), None, "no request was sent");
    }

    #[test]
    fn percentiles_are_within_the_range_of_the_response_times() {
        let mut counts = AttemptCounts::default();
        assert_eq!((counts.percentiles(), counts.success_rate()), (None, None));
        (0..98).for_each(|_| counts.record(Outcome::Delivered, &answered(40)));
        (0..2).for_each(|_| counts.record(Outcome::Failed, &answered(4_000)));
        let Percentiles { p50, p95, p99 } = counts.percentiles().unwrap();
        assert!((30.0..=50.0).contains(&p50) && (30.0..=50.0).contains(&p95) && (3_000.0..=5_000.0).contains(&p99));
        assert_eq!(counts.success_rate(), Some(0.98));
        assert_eq!(
            (range_of(Duration::ZERO), range_of(Duration::from_millis(1)), range_of(Duration::from_secs(31))),
            (0, 0, 24)
        );
    }
}
