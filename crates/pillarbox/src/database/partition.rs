//! Daily partitions: how far ahead they are created, and how old ones are dropped. Neither blocks writers.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{Acquire, PgConnection, Postgres, Transaction};

/// How many days ahead partitions are created. Maintenance may pause for a week; after that, rows go to the overflow
/// partition.
pub const DAYS_AHEAD: i32 = 7;

/// The SQLSTATE of a lock that was not acquired within lock_timeout.
const LOCK_NOT_AVAILABLE: &str = "55P03";
/// How often a maintenance run tries to lock a table, and the pause in between. Each try lets others wait for up to 100 ms, so
/// it is a few: enough for short transactions, while a long one delays the drop until the next run.
const LOCK_TRIES: u32 = 4;
const LOCK_PAUSE: Duration = Duration::from_millis(250);

/// Returns the qualified names of the partitions whose day ended before `cutoff`, oldest first; never a day from yesterday
/// on. `parent` is also qualified. The names contain only letters, digits and `_`, so they need no quoting.
pub async fn days_before(db: &mut PgConnection, parent: &str, cutoff: DateTime<Utc>) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar(
        "select relnamespace::regnamespace::text || '.' || relname
         from pg_class join pg_inherits on inhrelid = pg_class.oid
         where inhparent = $1::regclass and relname ~ ('^' || split_part($1, '.', 2) || '_[0-9]{8}$')
           and to_date(right(relname, 8), 'YYYYMMDD') + 1
               <= (least($2, pillarbox.yesterday()) at time zone 'UTC')::date
         order by relname",
    )
    .bind(parent)
    .bind(cutoff)
    .fetch_all(db)
    .await
}

/// Begins a transaction in which no other transaction writes to a partition, so that its rows can be checked or copied before it is
/// dropped. Returns None if a transaction in progress has written to it; the next maintenance run tries again.
pub async fn lock_day<'c>(
    db: &'c mut PgConnection,
    partition: &str,
) -> sqlx::Result<Option<Transaction<'c, Postgres>>> {
    let mut tx = db.begin().await?;
    let statements = format!(
        "set local lock_timeout = '100ms';
         lock table {partition} in share row exclusive mode"
    );
    if execute_when_free(&mut tx, &statements).await? {
        return Ok(Some(tx));
    }
    tx.rollback().await?;
    report_in_use(partition);
    Ok(None)
}

/// Drops a partition that [`lock_day`] has locked, and commits. This needs an exclusive lock on the table, and writers queue
/// behind the request while a reader blocks it, so a try ends after 100 ms; after a few tries it is left to the next
/// maintenance run. Fails if the day is yesterday or later.
pub async fn drop_day(mut tx: Transaction<'_, Postgres>, parent: &str, partition: &str) -> sqlx::Result<()> {
    let statement = format!("select pillarbox.drop_day('{parent}'::regclass, '{partition}'::regclass)");
    if execute_when_free(&mut tx, &statement).await? {
        tx.commit().await?;
        tracing::info!(partition, "dropped a partition");
    } else {
        tx.rollback().await?;
        report_in_use(partition);
    }
    Ok(())
}

/// Executes statements that need locks, which it tries a few times. Returns false, with the transaction as it was before, if
/// others had the locks each time.
async fn execute_when_free(tx: &mut Transaction<'_, Postgres>, statements: &str) -> sqlx::Result<bool> {
    for tries_left in (0..LOCK_TRIES).rev() {
        let mut savepoint = tx.begin().await?;
        let executed = sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&mut *savepoint).await;
        if unless_locked(executed)?.is_some() {
            savepoint.commit().await?;
            return Ok(true);
        }
        savepoint.rollback().await?;
        if tries_left > 0 {
            tokio::time::sleep(LOCK_PAUSE).await;
        }
    }
    Ok(false)
}

fn report_in_use(partition: &str) {
    tracing::info!(partition, "a partition is in use; the next maintenance run tries to drop it again");
}

/// Returns None if the statement failed because another session has the lock.
pub fn unless_locked<T>(outcome: sqlx::Result<T>) -> sqlx::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => Ok(None),
        Err(error) => Err(error),
    }
}
