//! The attempts of this process, added to the totals of the installation once a second.
//!
//! The totals are for the overview of operators. Counting the stored attempts would cost more with each of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use runtime::worker::Round;
use sqlx::PgPool;
use uuid::Uuid;

use crate::deliveries::attempt_result::Attempt;
use crate::health::counts::{AttemptCounts, Histogram, range_of};
use crate::health::store;

/// Rows that the processes of an installation share. With more processes, some add to the same row.
const SLOTS: u128 = 64;

/// Attempts that are saved, and not yet added to the totals. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct AttemptTotals {
    pending: Arc<Mutex<TotalCounts>>,
    slot: i16,
}

impl Default for AttemptTotals {
    fn default() -> AttemptTotals {
        // Random: the processes of containers usually have the same id.
        let slot = (Uuid::new_v4().as_u128() % SLOTS) as i16;
        AttemptTotals { pending: Arc::default(), slot }
    }
}

/// The attempts of all subscribers.
#[derive(Debug, Default, sqlx::FromRow)]
pub(crate) struct TotalCounts {
    #[sqlx(flatten)]
    pub(crate) attempts: AttemptCounts,
    /// Deliveries per range of the time since the event was posted.
    #[sqlx(try_from = "Vec<i64>")]
    pub(crate) end_to_end: Histogram,
}

impl TotalCounts {
    fn record(&mut self, attempt: &Attempt) {
        self.attempts.record(attempt.outcome, &attempt.result);
        if let Some(time) = attempt.time_since_post {
            self.end_to_end[range_of(time)] += 1;
        }
    }

    fn add(&mut self, other: &TotalCounts) {
        self.attempts.add(&other.attempts);
        self.end_to_end.iter_mut().zip(other.end_to_end).for_each(|(sum, count)| *sum += count);
    }
}

impl AttemptTotals {
    pub(crate) fn record(&self, attempts: &[Attempt]) {
        let mut pending = self.pending();
        attempts.iter().for_each(|attempt| pending.record(attempt));
    }

    /// Adds the attempts to the totals. If that fails, the next call adds them.
    pub(crate) async fn flush(&self, db: &PgPool) -> Result<Round, sqlx::Error> {
        let counts = std::mem::take(&mut *self.pending());
        if counts.attempts.attempts() == 0 {
            return Ok(Round::Idle);
        }
        let adding = async { store::overview::add_attempts(&mut *db.acquire().await?, self.slot, &counts).await };
        if let Err(error) = adding.await {
            self.pending().add(&counts);
            return Err(error);
        }
        Ok(Round::Idle)
    }

    fn pending(&self) -> MutexGuard<'_, TotalCounts> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
