//! Partitions by day: how far ahead they are made, and how old ones go. No writer waits for either.

use chrono::{DateTime, Utc};
use sqlx::{Acquire, PgConnection};

/// With so many days made ahead, a week without anybody maintaining costs nothing; then rows overflow, and are kept.
pub const DAYS_AHEAD: i32 = 7;

/// PostgreSQL's code for a lock that was not to be had in time.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// The partitions of days that ended before `cutoff`, oldest first, with their schema. `parent` has its schema, too. Their
/// names are ours, and hold nothing but letters, digits and `_`.
pub async fn days_before(db: &mut PgConnection, parent: &str, cutoff: DateTime<Utc>) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar(
        "select relnamespace::regnamespace::text || '.' || relname
         from pg_class join pg_inherits on inhrelid = pg_class.oid
         where inhparent = $1::regclass and relname ~ ('^' || split_part($1, '.', 2) || '_[0-9]{8}$')
           and to_date(right(relname, 8), 'YYYYMMDD') + 1 <= ($2 at time zone 'UTC')::date
         order by relname",
    )
    .bind(parent)
    .bind(cutoff)
    .fetch_all(db)
    .await
}

/// Drops one partition. It needs the table for a moment; while it waits for a long reader, writers wait behind it, so it
/// waits no longer than nobody notices.
pub async fn drop_day(db: &mut PgConnection, parent: &str, partition: &str) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    let statements = format!(
        "set local lock_timeout = '100ms';
         alter table {parent} detach partition {partition};
         drop table {partition}"
    );
    let dropped = sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&mut *tx).await;
    match unless_locked(dropped)? {
        Some(_) => {
            tx.commit().await?;
            tracing::info!(partition, "dropped");
        }
        None => {
            tx.rollback().await?;
            tracing::info!(partition, "is in use; it can go another time");
        }
    }
    Ok(())
}

/// None if someone else holds the lock.
pub fn unless_locked<T>(outcome: sqlx::Result<T>) -> sqlx::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => Ok(None),
        Err(error) => Err(error),
    }
}
