//! The clock: code that depends on the time has a [`Clock`] as a parameter, so that a test can set the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use chrono::{DateTime, SubsecRound, Utc};

/// The system's clock, or a manual clock of a test.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    System,
    /// Microseconds since 1970.
    Manual(Arc<AtomicI64>),
}

impl Clock {
    pub fn system() -> Clock {
        Clock(Source::System)
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
            Source::Manual(micros) => {
                DateTime::from_timestamp_micros(micros.load(Ordering::Relaxed)).unwrap_or_default()
            }
        }
    }

    /// Advances a manual clock. Has no effect on the system's clock.
    pub fn advance(&self, by: Duration) {
        if let Source::Manual(micros) = &self.0 {
            micros.fetch_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX), Ordering::Relaxed);
        }
    }
}
