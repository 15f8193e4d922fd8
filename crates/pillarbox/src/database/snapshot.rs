//! Snapshots: which transactions are visible, together with the log's sequence value from before.
//!
//! Exported as `log::Snapshot`. It is implemented here because [`super::cluster_identity`] also needs one.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::incarnation::Incarnation;

/// A PostgreSQL snapshot plus the value of the log's sequence that was read before it.
///
/// Every row of a transaction that gets its xid after the snapshot has an id above that value: the first column of a log
/// row is its xid, which is assigned before its id (see `0001_pillarbox.sql`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Snapshot {
    /// The last id that the log's sequence had returned before the snapshot was taken.
    pub(crate) id_before: i64,
    /// `xmin:xmax:` and the transactions between them that were in progress, as PostgreSQL formats a `pg_snapshot`.
    pub(crate) visible: String,
    pub(crate) at: DateTime<Utc>,
    /// The incarnation of the database in which it is valid: that in which it was taken, or in which it was loaded. A
    /// stored snapshot is valid in every incarnation that has its row.
    pub(crate) incarnation: Incarnation,
}

impl Snapshot {
    /// Returns a snapshot from before the first message; in a restored log, from after the restored messages.
    pub async fn beginning(db: &mut PgConnection) -> sqlx::Result<Snapshot> {
        let incarnation = Incarnation::current(db).await?;
        let query = "select floor_id, floor::text, floor_at from pillarbox.cluster_identity";
        let (id_before, visible, at) = sqlx::query_as(query).fetch_one(db).await?;
        Ok(Snapshot { id_before, visible, at, incarnation })
    }

    /// Takes a snapshot now. The connection must not be in a transaction.
    ///
    /// Three steps, in this order: read the sequence; begin and end a transaction W; take the snapshot. The xmax of a
    /// snapshot is not the next transaction id but the one after the last transaction that ENDED. Without W,
    /// transactions in progress could lie above xmax, unlisted, with ids that the sequence has already returned. W ends
    /// before the snapshot is taken, so every transaction at or above xmax got its xid after W, and its ids after the
    /// sequence was read.
    pub async fn now(db: &mut PgConnection) -> sqlx::Result<Snapshot> {
        // W writes nothing, so it need not wait for the disk.
        let rows = sqlx::raw_sql(
            "select case when is_called then last_value else 0 end, clock_timestamp(), (select id from pillarbox.incarnation)
             from pillarbox.log_id;
             begin; set local synchronous_commit = off; select pg_current_xact_id(); commit;
             select pg_current_snapshot()::text",
        )
        .fetch_all(&mut *db)
        .await?;
        let [sequence, _, snapshot] = rows.as_slice() else { return Err(sqlx::Error::RowNotFound) };
        let incarnation = match sequence.try_get::<Option<Uuid>, _>(2)? {
            Some(id) => Incarnation::from(id),
            None => Incarnation::current(db).await?,
        };
        let (id_before, visible, at) = (sequence.try_get(0)?, snapshot.try_get(0)?, sequence.try_get(1)?);
        Ok(Snapshot { id_before, visible, at, incarnation })
    }

    /// Returns whether anything can have become visible since this snapshot: the sequence has returned new ids, a
    /// transaction that was in progress has ended, or the database has another incarnation. One cheap statement, which
    /// consumes no transaction id.
    pub async fn is_outdated(&self, db: &mut PgConnection) -> sqlx::Result<bool> {
        let query = "select is_called and last_value > $1
                         or exists (select from pg_snapshot_xip($2::pg_snapshot) as was (xid)
                                    where not was.xid in (select pg_snapshot_xip(pg_current_snapshot())))
                         or (select id from pillarbox.incarnation) is distinct from $3
                     from pillarbox.log_id";
        let query = sqlx::query_scalar(query).bind(self.id_before).bind(&self.visible);
        query.bind(Uuid::from(self.incarnation)).fetch_one(db).await
    }

    /// Returns whether this snapshot was taken after `other`. Each snapshot ends a separate transaction, so comparing
    /// xmax is enough.
    pub(crate) fn is_after(&self, other: &Snapshot) -> bool {
        self.xmax() > other.xmax()
    }

    fn xmax(&self) -> u64 {
        self.visible.split(':').nth(1).and_then(|xmax| xmax.parse().ok()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_snapshot_with_the_higher_xmax_is_later() {
        let (at, incarnation) = (DateTime::UNIX_EPOCH, Uuid::nil().into());
        let snapshot = |visible: &str| Snapshot { id_before: 1, visible: visible.to_owned(), at, incarnation };
        assert!(snapshot("9:101:9,10").is_after(&snapshot("9:20:9,10")));
        assert!(!snapshot("9:20:9,10").is_after(&snapshot("9:101:9,10")));
        assert!(!snapshot("3:3:").is_after(&snapshot("3:3:")));
    }
}
