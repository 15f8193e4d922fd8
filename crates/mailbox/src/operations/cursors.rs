//! Resetting and deleting the cursors of consumers.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};

use super::replays;
use crate::consumers::{filter_changes, parked_messages, positions};
use crate::log::Snapshot;

/// Makes a consumer continue from now, and with `from` also replay the messages since then. Its shard workers start
/// again with the new positions. Returns false if there is no such consumer.
pub async fn reset(db: &PgPool, consumer: &str, from: Option<DateTime<Utc>>) -> sqlx::Result<bool> {
    let mut db = db.acquire().await?;
    let now = Snapshot::now(&mut db).await?;
    let mut tx = sqlx::Acquire::begin(&mut *db).await?;
    let is_reset = reset_in(&mut tx, consumer, from, &now).await?;
    tx.commit().await?;
    Ok(is_reset)
}

/// The same in the caller's transaction. The snapshot must be from before the transaction.
pub async fn reset_in(
    tx: &mut PgConnection,
    consumer: &str,
    from: Option<DateTime<Utc>>,
    now: &Snapshot,
) -> sqlx::Result<bool> {
    let query = "update pillarbox.cursor set lapsed_at = null, since = now() where consumer = $1";
    if sqlx::query(query).bind(consumer).execute(&mut *tx).await?.rows_affected() == 0 {
        return Ok(false);
    }
    // Without its row, no shard worker can commit a position that it read before the reset.
    sqlx::query("delete from pillarbox.shard_worker where consumer = $1").bind(consumer).execute(&mut *tx).await?;
    positions::append_after(tx, consumer, now).await?;
    if let Some(from) = from {
        let request = replays::Request {
            consumer: consumer.to_owned(),
            from,
            to: now.at + replays::SNAPSHOT_MARGIN,
            again: false,
        };
        replays::request_in(tx, &request).await?;
    }
    Ok(true)
}

/// The result of deleting a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteResult {
    Deleted,
    NotFound,
    /// A running process works for it and would register it again at once.
    InUse,
}

/// Deletes a consumer. Its parked messages become dead letters. Its positions, of which there may be millions, are not
/// read any more and are dropped with their partitions.
pub async fn delete(db: &PgPool, consumer: &str) -> sqlx::Result<DeleteResult> {
    let mut tx = db.begin().await?;
    let result = delete_in(&mut tx, consumer).await?;
    tx.commit().await?;
    Ok(result)
}

/// The same in the caller's transaction.
pub async fn delete_in(tx: &mut PgConnection, consumer: &str) -> sqlx::Result<DeleteResult> {
    let in_use: bool = sqlx::query_scalar(
        "select exists (select from pillarbox.shard_worker join pillarbox.replica on replica.id = shard_worker.replica
                        where shard_worker.consumer = $1 and replica.until > now())",
    )
    .bind(consumer)
    .fetch_one(&mut *tx)
    .await?;
    if in_use {
        return Ok(DeleteResult::InUse);
    }
    let query = "delete from pillarbox.cursor where consumer = $1";
    if sqlx::query(query).bind(consumer).execute(&mut *tx).await?.rows_affected() == 0 {
        return Ok(DeleteResult::NotFound);
    }
    for statement in [
        "delete from pillarbox.shard_worker where consumer = $1",
        "delete from pillarbox.lease where consumer = $1",
        "delete from pillarbox.discarded where consumer = $1",
        "with deleted as (delete from pillarbox.replay where consumer = $1 returning id)
         delete from pillarbox.replay_shard using deleted where replay = deleted.id",
    ] {
        sqlx::query(statement).bind(consumer).execute(&mut *tx).await?;
    }
    filter_changes::delete(tx, consumer).await?;
    parked_messages::give_up_all(tx, Some(consumer), "its consumer was dropped").await?;
    Ok(DeleteResult::Deleted)
}
