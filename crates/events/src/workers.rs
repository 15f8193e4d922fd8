//! Timed rounds. Every process with the role has them; they take turns in the database.

use chrono::{DateTime, TimeDelta, Utc};
use kit::worker::Round;
use sqlx::PgPool;

use crate::flow::reconcile::{self, ReconcileError};
use crate::store::trending;

/// Scores anew, if the newest scores are old enough.
pub(crate) async fn score(db: &PgPool, every: TimeDelta, now: DateTime<Utc>) -> sqlx::Result<Round> {
    if let Some(epoch) = trending::take(&mut *db.acquire().await?, now - every, now).await? {
        tracing::debug!(epoch, "scored what is trending");
    }
    Ok(Round::Idle)
}

/// Compares counts with the joins service, if that was long ago.
pub(crate) async fn reconcile(db: &PgPool, every: TimeDelta, now: DateTime<Utc>) -> Result<Round, ReconcileError> {
    reconcile::begin_unless_since(db, now - every, now).await?;
    Ok(Round::Idle)
}
