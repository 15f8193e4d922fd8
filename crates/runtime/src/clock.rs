//! The clock: code that depends on the time has a [`Clock`] as a parameter, so that a test can set the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};

/// The system's clock, a clock that follows the database's, or a manual clock of a test.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    System,
    Following(Arc<Following>),
    /// Microseconds since 1970.
    Manual(Arc<AtomicI64>),
}

/// The time at `start`, in microseconds since 1970. The time since then is measured with the monotonic clock, so a step of
/// the system's clock has no effect.
#[derive(Debug)]
struct Following {
    start: Instant,
    start_micros: AtomicI64,
}

impl Clock {
    pub fn system() -> Clock {
        Clock(Source::System)
    }

    /// Returns a clock that follows another machine's, by [`Clock::follow`]. Until then it is the system's time.
    pub fn following() -> Clock {
        let start_micros = AtomicI64::new(Utc::now().timestamp_micros());
        Clock(Source::Following(Arc::new(Following { start: Instant::now(), start_micros })))
    }

    /// Returns a clock that stands still until it is advanced.
    pub fn manual(start: DateTime<Utc>) -> Clock {
        Clock(Source::Manual(Arc::new(AtomicI64::new(start.timestamp_micros()))))
    }

    /// Returns the time in the precision of PostgreSQL, microseconds, so that a value read back equals the value
    /// written.
    pub fn now(&self) -> DateTime<Utc> {
        match &self.0 {
            Source::System => Utc::now().trunc_subsecs(6),
            Source::Following(clock) => {
                from_micros(clock.start_micros.load(Ordering::Relaxed).saturating_add(micros(clock.start.elapsed())))
            }
            Source::Manual(micros) => from_micros(micros.load(Ordering::Relaxed)),
        }
    }

    /// Sets a following clock to a time that the other machine had at some instant between `earliest` and `latest`. A clock
    /// that already agrees is not changed, so the time of a round trip does not make it jump. Has no effect on other clocks.
    pub fn follow(&self, time: DateTime<Utc>, earliest: Instant, latest: Instant) {
        let Source::Following(clock) = &self.0 else { return };
        let at_start = |instant: Instant| {
            time.timestamp_micros().saturating_sub(micros(instant.saturating_duration_since(clock.start)))
        };
        let (lowest, highest) = (at_start(latest), at_start(earliest));
        let current = clock.start_micros.load(Ordering::Relaxed);
        clock.start_micros.store(current.clamp(lowest.min(highest), highest), Ordering::Relaxed);
    }

    /// Advances a manual clock. Has no effect on other clocks.
    pub fn advance(&self, by: Duration) {
        if let Source::Manual(time) = &self.0 {
            time.fetch_add(micros(by), Ordering::Relaxed);
        }
    }
}

/// How far `time`, read at some instant of a round trip, is behind a clock that showed `sent_at` at its beginning; negative
/// if it is ahead. Zero if the round trip explains the difference.
pub fn difference(sent_at: DateTime<Utc>, round_trip: Duration, time: DateTime<Utc>) -> TimeDelta {
    let received_at = sent_at + TimeDelta::from_std(round_trip).unwrap_or(TimeDelta::MAX);
    match () {
        () if sent_at > time => sent_at - time,
        () if received_at < time => received_at - time,
        () => TimeDelta::zero(),
    }
}

fn from_micros(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or_default()
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_following_clock_has_the_time_of_the_other_machine() {
        let (clock, start) = (Clock::following(), Instant::now());
        let other = Utc::now() + TimeDelta::days(40);
        clock.follow(other, start, start + Duration::from_millis(10));
        let ahead = clock.now() - other;
        // The round trip of 10 ms, and a microsecond for each of the two times that are rounded down.
        assert!((TimeDelta::microseconds(-10_002)..TimeDelta::seconds(5)).contains(&ahead), "{ahead}");
        clock.follow(other - TimeDelta::days(80), start, start);
        assert!(clock.now() < other - TimeDelta::days(79), "it also follows backwards");
    }

    #[test]
    fn a_slow_round_trip_does_not_move_a_clock_that_agrees() {
        let (clock, start) = (Clock::following(), Instant::now());
        let before = clock.now();
        clock.follow(before + TimeDelta::seconds(3), start, start + Duration::from_secs(10));
        assert!(clock.now() - before < TimeDelta::seconds(2));
    }

    #[test]
    fn a_difference_that_the_round_trip_explains_is_zero() {
        let sent_at: DateTime<Utc> = "2026-02-01T12:00:00Z".parse().unwrap();
        let difference = |time: i64| difference(sent_at, Duration::from_secs(90), sent_at + TimeDelta::seconds(time));
        assert_eq!([0, 60, 90].map(difference), [TimeDelta::zero(); 3]);
        assert_eq!(difference(-61), TimeDelta::seconds(61), "the process is ahead");
        assert_eq!(difference(151), TimeDelta::seconds(-61), "the process is behind");
    }
}
