//! Counts in PostgreSQL.

use chrono::{DateTime, Utc};
use http_kit::admission::gates::Gates;
use pillarbox::database::Database;
use runtime::clock::Clock;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::ReadResult;
use crate::counts::{Changed, Counts, Limits, Reading, Replaced};
use crate::domain::{Items, Snapshot, Target};
use crate::error::StateError;
use crate::store::state as store;

/// The `run` of counts in PostgreSQL: what it loses in a failover, it loses together with the project's row or before it.
const RUN: &str = "postgres";
/// Changes of one project that use a connection at the same time. They wait for each other in the database anyway, and must not
/// wait with all connections of the process.
pub(crate) const CHANGES_MAX: usize = 2;

/// The counts in the database of the service.
pub(crate) struct PostgresState {
    pub(crate) db: Database,
    pub(crate) clock: Clock,
    pub(crate) limits: Limits,
    pub(crate) gates: Gates<String>,
}

/// Initialises the counts, unless they are initialised with this token already. Returns the server that has them.
pub(super) async fn initialise(
    tx: &mut Transaction<'_, Postgres>,
    project_id: &str,
    token: Uuid,
    expires_at: DateTime<Utc>,
) -> Result<String, StateError> {
    store::initialise(tx, project_id, token, expires_at).await?;
    Ok(RUN.to_owned())
}

impl PostgresState {
    pub(super) async fn mark(&self, counts: &Counts, items: &Items) -> Result<Option<Changed>, StateError> {
        if counts.run != RUN {
            return Ok(None);
        }
        let _permit = self.gates.enter(counts.project_id.as_str()).await;
        let mut db = self.db.acquire().await?;
        let (now, limits) = (self.clock.now(), self.limits);
        let marked = store::mark(&mut db, counts, items, now, limits).await?;
        if marked.is_some() {
            return Ok(marked);
        }
        // The counts are lost, or the limit is near. Repeats are still accepted.
        match store::count_with(&mut db, counts, items).await? {
            Some(count) if count > limits.items_max => Err(StateError::TooManyItems(limits.items_max)),
            Some(_) => Ok(store::mark(&mut db, counts, items, now, Limits { items_max: i64::MAX, ..limits }).await?),
            None => Ok(None),
        }
    }

    pub(super) async fn read(&self, many: &[Counts], completes: bool) -> Result<Vec<ReadResult>, StateError> {
        let mut db = self.db.acquire().await?;
        let now = self.clock.now();
        if completes {
            store::complete(&mut db, many, now, self.limits.keep).await?;
        }
        let found = store::read(&mut db, many, now).await?;
        Ok(many.iter().zip(found).map(|(counts, found)| Ok(found.filter(|_| counts.run == RUN))).collect())
    }

    /// Reads counts in the transaction that changes them.
    pub(crate) async fn read_in(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        counts: &Counts,
    ) -> Result<Option<Reading>, StateError> {
        let found = store::read(tx, std::slice::from_ref(counts), self.clock.now()).await?.pop();
        Ok(found.flatten().filter(|_| counts.run == RUN))
    }

    /// Sets the status and the total, if they are still those of `from`. Completes the project if it is at the finish line then.
    pub(crate) async fn replace_in(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        counts: &Counts,
        from: &Snapshot,
        to: Target,
    ) -> Result<Replaced, StateError> {
        Ok(store::replace(tx, counts, from, to, self.clock.now(), self.limits.keep).await?)
    }
}
