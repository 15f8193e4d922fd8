//! Time as a parameter: what depends on it takes a [`Clock`], so that a test can move it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use chrono::{DateTime, SubsecRound, Utc};

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

    /// A clock that stands still until it is advanced.
    pub fn manual(start: DateTime<Utc>) -> Clock {
        Clock(Source::Manual(Arc::new(AtomicI64::new(start.timestamp_micros()))))
    }

    /// Microseconds, as PostgreSQL keeps them: a value read back equals the value written.
    pub fn now(&self) -> DateTime<Utc> {
        match &self.0 {
            Source::System => Utc::now().trunc_subsecs(6),
            Source::Manual(micros) => {
                DateTime::from_timestamp_micros(micros.load(Ordering::Relaxed)).unwrap_or_default()
            }
        }
    }

    /// Moves a manual clock; the system's clock is not ours to move.
    pub fn advance(&self, by: Duration) {
        if let Source::Manual(micros) = &self.0 {
            micros.fetch_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX), Ordering::Relaxed);
        }
    }
}
