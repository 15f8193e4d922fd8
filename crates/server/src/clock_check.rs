//! Compares the clock of this process with the database's, and makes the services follow the database's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pillarbox::database::time::Measurement;
use runtime::clock::Clock;
use runtime::health::{Health, Probe};
use sqlx::PgPool;

/// Timeout of one comparison.
const TIME_MAX: Duration = Duration::from_secs(3);

/// The comparison, and the probe that reports its result. It is not required: a process with a wrong clock serves requests,
/// because what it decides about data is decided by the database's time.
pub(crate) struct ClockCheck {
    db: PgPool,
    /// The clock of the services, which follows the database's.
    clock: Clock,
    probe: Probe,
    differs: AtomicBool,
}

impl ClockCheck {
    pub(crate) fn new(db: &PgPool, clock: &Clock, health: &Health) -> ClockCheck {
        ClockCheck {
            db: db.clone(),
            clock: clock.clone(),
            probe: health.task("clock", false),
            differs: AtomicBool::new(false),
        }
    }

    /// Compares the clocks once. Fails if the database's time cannot be read.
    pub(crate) async fn run(&self) -> sqlx::Result<()> {
        let measured = Measurement::read(&mut *self.db.acquire().await?).await?;
        measured.apply_to(&self.clock);
        let checked = measured.check();
        let differed = self.differs.swap(checked.is_err(), Ordering::Relaxed);
        match checked {
            Ok(()) => self.probe.up(),
            Err(differs) => {
                if !differed {
                    tracing::error!("{differs}; this process does not maintain the database until then");
                }
                self.probe.down(&differs.to_string());
            }
        }
        Ok(())
    }

    /// The same, but within a bounded time. A failure is not reported here: the check of the database reports it.
    pub(crate) async fn run_in_time(&self) {
        let _ = tokio::time::timeout(TIME_MAX, self.run()).await;
    }
}
