//! The attempts of this process, added to the totals of the installation once a second.
//!
//! The totals are for the overview of operators. Counting the stored attempts would cost more with each of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kit::worker::Round;
use sqlx::PgPool;

use crate::delivery::Attempt;
use crate::health::AttemptCounts;
use crate::store::overview;

/// Rows that the processes of an installation share. With more processes, some add to the same row.
const SLOTS: u32 = 64;

/// Attempts that are saved, and not yet added to the totals. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct AttemptTotals(Arc<Mutex<AttemptCounts>>);

impl AttemptTotals {
    pub(crate) fn record(&self, attempts: &[Attempt]) {
        let mut pending = self.pending();
        attempts.iter().for_each(|attempt| pending.record(attempt.outcome, &attempt.result));
    }

    /// Adds the attempts to the totals. If that fails, the next call adds them.
    pub(crate) async fn flush(&self, db: &PgPool) -> Result<Round, sqlx::Error> {
        let counts = std::mem::take(&mut *self.pending());
        if counts.attempts() == 0 {
            return Ok(Round::Idle);
        }
        let slot = (std::process::id() % SLOTS) as i16;
        let adding = async { overview::add_attempts(&mut *db.acquire().await?, slot, &counts).await };
        if let Err(error) = adding.await {
            self.pending().add(&counts);
            return Err(error);
        }
        Ok(Round::Idle)
    }

    fn pending(&self) -> MutexGuard<'_, AttemptCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
