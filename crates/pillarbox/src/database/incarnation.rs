//! Incarnations: the time from one possible loss of transactions to the next.
//!
//! A crash, a promoted standby or a restored backup may have lost transactions that a process has seen. The row of
//! `pillarbox.incarnation` is lost with them, because the table is unlogged, and the next process inserts another id. No
//! session survives these occasions, and a standby cannot read the table: so a connection belongs to one incarnation.

use sqlx::PgConnection;
use uuid::Uuid;

/// Identifies an incarnation of the database. Two incarnations never have the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(Uuid);

impl Incarnation {
    /// Returns the incarnation that this connection belongs to, and begins one if there is none.
    pub async fn current(db: &mut PgConnection) -> sqlx::Result<Incarnation> {
        let find = "select id from pillarbox.incarnation";
        if let Some(id) = sqlx::query_scalar(find).fetch_optional(&mut *db).await? {
            return Ok(Incarnation(id));
        }
        let begin = "insert into pillarbox.incarnation default values on conflict (only_one) do nothing";
        if sqlx::query(begin).execute(&mut *db).await?.rows_affected() == 1 {
            tracing::info!(
                "this database is new, or its server was not shut down cleanly: all processes read their state from it again"
            );
        }
        // Another process may have been faster.
        Ok(Incarnation(sqlx::query_scalar(find).fetch_one(db).await?))
    }
}

impl From<Uuid> for Incarnation {
    fn from(id: Uuid) -> Incarnation {
        Incarnation(id)
    }
}

impl From<Incarnation> for Uuid {
    fn from(incarnation: Incarnation) -> Uuid {
        incarnation.0
    }
}
