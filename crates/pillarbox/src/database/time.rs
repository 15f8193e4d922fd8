//! The database's time, which decides about data: what is retained, what has expired, who has a lease. The clocks of
//! processes differ, and one that is far ahead would delete everything.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use runtime::clock::{Clock, difference};
use runtime::worker::Round;
use sqlx::{PgConnection, PgPool};

/// How far the clock of a process may differ from the database's. A process beyond it reports an error and maintains
/// nothing.
pub const DIFFERENCE_MAX: TimeDelta = TimeDelta::minutes(1);

/// Returns the database's time.
pub async fn now(db: &mut PgConnection) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await
}

/// The database's time together with the clock of this process.
#[derive(Debug, Clone, Copy)]
pub struct Measurement {
    now: DateTime<Utc>,
    /// The clock of this process before the round trip.
    process_sent_at: DateTime<Utc>,
    sent_at: Instant,
    round_trip: Duration,
}

impl Measurement {
    /// Reads both, and sets the gauge of their difference.
    pub async fn read(db: &mut PgConnection) -> sqlx::Result<Measurement> {
        let (process_sent_at, sent_at) = (Clock::system().now(), Instant::now());
        let now = now(db).await?;
        let measured = Measurement { now, process_sent_at, sent_at, round_trip: sent_at.elapsed() };
        metrics::gauge!("pillarbox_clock_ahead_seconds").set(measured.process_ahead().as_seconds_f64());
        Ok(measured)
    }

    /// How far the clock of this process is ahead of the database's; negative if it is behind, zero if the round trip
    /// explains the difference.
    pub fn process_ahead(&self) -> TimeDelta {
        difference(self.process_sent_at, self.round_trip, self.now)
    }

    /// Fails if the clocks differ by more than [`DIFFERENCE_MAX`].
    pub fn check(&self) -> Result<(), ClockDiffers> {
        check_difference(self.process_ahead())
    }

    /// Sets a following clock to the database's time.
    pub fn apply_to(&self, clock: &Clock) {
        clock.follow(self.now, self.sent_at, self.sent_at + self.round_trip);
    }
}

/// Fails if the clock of this process is ahead of the database's, or behind it, by more than [`DIFFERENCE_MAX`].
pub fn check_difference(ahead: TimeDelta) -> Result<(), ClockDiffers> {
    if ahead.abs() > DIFFERENCE_MAX { Err(ClockDiffers { ahead }) } else { Ok(()) }
}

/// The clock of this process differs too much from that of the database.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error(
    "the clock of this machine is {} s {} the database's, and at most {} s are accepted: correct the clock that is wrong",
    .ahead.abs().num_seconds(),
    if *.ahead > TimeDelta::zero() { "ahead of" } else { "behind" },
    DIFFERENCE_MAX.num_seconds()
)]
pub struct ClockDiffers {
    ahead: TimeDelta,
}

/// Why a round of maintenance did not succeed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say what they mean")]
pub enum MaintenanceError<E> {
    #[error("nothing is maintained: {0}")]
    ClockDiffers(#[from] ClockDiffers),
    #[error("the database's time is unknown: {0}")]
    Unknown(#[from] sqlx::Error),
    #[error("{0}")]
    Task(E),
}

/// Runs a round of maintenance, unless the clock of this process differs from the database's: one of them is wrong, and what
/// was deleted by the wrong one cannot be restored.
pub async fn maintain<E>(
    db: &PgPool,
    round: impl Future<Output = Result<Round, E>>,
) -> Result<Round, MaintenanceError<E>> {
    Measurement::read(&mut *db.acquire().await?).await?.check()?;
    round.await.map_err(MaintenanceError::Task)
}
