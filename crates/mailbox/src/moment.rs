//! Moments of the log.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

/// A moment of the log: what is visible then, and an id below all that begins later.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Of the sequence, read before the snapshot was taken.
    pub(crate) id_before: i64,
    /// `xmin:xmax:` and the transactions between them that were in progress.
    pub(crate) snapshot: String,
    pub(crate) at: DateTime<Utc>,
}

impl Moment {
    /// Before the first message; in a log that was restored, behind what was restored.
    pub async fn beginning(db: &mut PgConnection) -> sqlx::Result<Moment> {
        let query = "select floor_id, floor::text, floor_at from pillarbox.home";
        Moment::from_row(&sqlx::query(query).fetch_one(db).await?)
    }

    /// This moment. Needs a connection that is not in a transaction.
    ///
    /// Three steps, in this order. Read the sequence. Begin and end a transaction W. Take the snapshot. A snapshot's
    /// xmax is not the next transaction id, but the one behind the last that ENDED: without W, transactions in progress
    /// could be above it, unlisted, with ids that the sequence has already given out. W ends before the snapshot is
    /// taken, so what is at or above xmax began after W, and took its ids after the sequence was read.
    pub async fn now(db: &mut PgConnection) -> sqlx::Result<Moment> {
        // W writes nothing, so there is nothing to wait for on disk.
        let rows = sqlx::raw_sql(
            "select case when is_called then last_value else 0 end, clock_timestamp() from pillarbox.log_id;
             begin; set local synchronous_commit = off; select pg_current_xact_id(); commit;
             select pg_current_snapshot()::text",
        )
        .fetch_all(db)
        .await?;
        let [sequence, _, snapshot] = rows.as_slice() else { return Err(sqlx::Error::RowNotFound) };
        Ok(Moment { id_before: sequence.try_get(0)?, snapshot: snapshot.try_get(0)?, at: sequence.try_get(1)? })
    }

    /// Whether anything can have become visible since this moment: ids were given out, or a transaction that was in
    /// progress then has ended. One cheap statement, which uses up no transaction id.
    pub async fn has_passed(&self, db: &mut PgConnection) -> sqlx::Result<bool> {
        let query = "select is_called and last_value > $1
                         or exists (select from pg_snapshot_xip($2::pg_snapshot) as was (xid)
                                    where not was.xid in (select pg_snapshot_xip(pg_current_snapshot())))
                     from pillarbox.log_id";
        sqlx::query_scalar(query).bind(self.id_before).bind(&self.snapshot).fetch_one(db).await
    }

    /// Whether this one was taken later. Each moment ends a transaction of its own, so xmax tells.
    pub(crate) fn is_after(&self, other: &Moment) -> bool {
        self.xmax() > other.xmax()
    }

    fn xmax(&self) -> u64 {
        self.snapshot.split(':').nth(1).and_then(|xmax| xmax.parse().ok()).unwrap_or(0)
    }

    /// From columns in this order: id, snapshot, time.
    fn from_row(row: &PgRow) -> sqlx::Result<Moment> {
        Ok(Moment { id_before: row.try_get(0)?, snapshot: row.try_get(1)?, at: row.try_get(2)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_moment_is_the_one_with_more_transactions_behind_it() {
        let moment = |snapshot: &str| Moment { id_before: 1, snapshot: snapshot.to_owned(), at: DateTime::UNIX_EPOCH };
        assert!(moment("9:101:9,10").is_after(&moment("9:20:9,10")));
        assert!(!moment("9:20:9,10").is_after(&moment("9:101:9,10")));
        assert!(!moment("3:3:").is_after(&moment("3:3:")));
    }
}
