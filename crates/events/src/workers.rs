//! Periodic tasks. Every process with the role runs them; locks in the database ensure that only one is
//! active.

use chrono::TimeDelta;
use pillarbox::database::Database;
use runtime::worker::Round;
use sqlx::PgPool;

use crate::flow;
use crate::flow::reconcile::ReconcileError;
use crate::flow::trending::Scored;

/// Scores the trending feed if the newest scores are older than `every`; otherwise adds new events to it.
pub(crate) async fn score(db: &PgPool, every: TimeDelta) -> sqlx::Result<Round> {
    match flow::trending::score(db, every).await? {
        Scored::All(epoch) => tracing::debug!(epoch, "scored the trending feed"),
        Scored::New(events) => tracing::debug!(events, "added new events to the trending feed"),
        Scored::Nothing => {}
    }
    Ok(Round::Idle)
}

/// Starts a reconciliation run if the last one is older than `every`.
pub(crate) async fn reconcile(db: &Database, every: TimeDelta) -> Result<Round, ReconcileError> {
    flow::reconcile::begin_if_due(db, every).await?;
    Ok(Round::Idle)
}
