//! Locks of work that one transaction at a time may do. They are rows, because every login of the database can hold an
//! advisory lock: a producer could stop the work, and nothing would show it.

use sqlx::PgConnection;

/// Acquires the lock until the end of the transaction. Returns false if another transaction holds it. It waits for another
/// transaction only if the lock has never been used before.
pub async fn try_work_lock(tx: &mut PgConnection, name: &'static str) -> sqlx::Result<bool> {
    let query = "select name from pillarbox.work_lock where name = $1 for update skip locked";
    if sqlx::query(query).bind(name).fetch_optional(&mut *tx).await?.is_some() {
        return Ok(true);
    }
    create(tx, name).await
}

/// Acquires the lock until the end of the transaction, and waits for it.
pub async fn work_lock(tx: &mut PgConnection, name: &str) -> sqlx::Result<()> {
    create(tx, name).await?;
    let query = "select name from pillarbox.work_lock where name = $1 for update";
    sqlx::query(query).bind(name).execute(tx).await.map(drop)
}

/// Creates the lock if it has never been used. Returns whether it has; a new row is locked by the transaction that inserts it.
async fn create(tx: &mut PgConnection, name: &str) -> sqlx::Result<bool> {
    let query = "insert into pillarbox.work_lock (name) values ($1) on conflict do nothing";
    Ok(sqlx::query(query).bind(name).execute(tx).await?.rows_affected() == 1)
}
