//! Periodic tasks. Every process with the role runs them; advisory locks in the database ensure that only one is
//! active.

use chrono::{DateTime, TimeDelta, Utc};
use kit::worker::Round;
use mailbox::database::Database;
use sqlx::PgPool;

use crate::flow;
use crate::flow::reconcile::ReconcileError;

/// Scores the trending feed if the newest scores are older than `every`.
pub(crate) async fn score(db: &PgPool, every: TimeDelta, now: DateTime<Utc>) -> sqlx::Result<Round> {
    if let Some(epoch) = flow::trending::score(db, now - every, now).await? {
        tracing::debug!(epoch, "scored the trending feed");
    }
    Ok(Round::Idle)
}

/// Starts a reconciliation run if the last one is older than `every`.
pub(crate) async fn reconcile(db: &Database, every: TimeDelta, now: DateTime<Utc>) -> Result<Round, ReconcileError> {
    flow::reconcile::begin_if_due(db, now - every, now).await?;
    Ok(Round::Idle)
}
