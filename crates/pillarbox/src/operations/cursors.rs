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
    if !begin_reset(tx, consumer).await? {
        return Ok(false);
    }
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

/// Returns false if there is no such consumer.
async fn begin_reset(tx: &mut PgConnection, consumer: &str) -> sqlx::Result<bool> {
    let query = "update pillarbox.cursor set lapsed_at = null, since = now() where consumer = $1";
    if sqlx::query(query).bind(consumer).execute(&mut *tx).await?.rows_affected() == 0 {
        return Ok(false);
    }
    // Without its row, no shard worker can commit a position that it read before the reset.
    sqlx::query("delete from pillarbox.shard_worker where consumer = $1").bind(consumer).execute(tx).await?;
    Ok(true)
}

/// The result of moving a consumer to the position of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MoveResult {
    /// The consumer has new positions.
    Moved,
    /// There is no consumer with this name.
    NotFound(String),
    /// A running process works for this consumer.
    InUse(String),
    /// The other consumer has passed these many messages without having processed them: they are parked.
    OtherHasParked(i64),
    /// The other consumer has lapsed, or has yet to finish a replay: its position does not tell what it has processed.
    OtherIsIncomplete,
    /// The consumer has read this many messages that the other one has not, counted up to 1,000.
    IsAhead(i64),
    /// This many messages, counted up to 1,000, are for the consumer and not for the other one. The consumer has not read them and
    /// would skip them.
    WouldSkip(i64),
}

/// Makes a consumer continue exactly where another one has stopped, so that it takes over: what the other one has processed it
/// does not get, and everything else it does. Changes nothing unless no process runs either of them.
pub async fn continue_like_in(tx: &mut PgConnection, consumer: &str, other: &str) -> sqlx::Result<MoveResult> {
    for name in [consumer, other] {
        let exists = "select exists (select from pillarbox.cursor where consumer = $1)";
        if !sqlx::query_scalar::<_, bool>(exists).bind(name).fetch_one(&mut *tx).await? {
            return Ok(MoveResult::NotFound(name.to_owned()));
        }
        if is_in_use(tx, name).await? {
            return Ok(MoveResult::InUse(name.to_owned()));
        }
    }
    let parked = "select count(*) from pillarbox.parked where consumer = $1";
    let parked: i64 = sqlx::query_scalar(parked).bind(other).fetch_one(&mut *tx).await?;
    if parked > 0 {
        return Ok(MoveResult::OtherHasParked(parked));
    }
    if is_incomplete(tx, other).await? {
        return Ok(MoveResult::OtherIsIncomplete);
    }
    let ahead = count_between(tx, (consumer, other), "one", "other", &format!("{FOR_ONE} and {FOR_OTHER}")).await?;
    if ahead > 0 {
        return Ok(MoveResult::IsAhead(ahead));
    }
    let skipped =
        count_between(tx, (consumer, other), "other", "one", &format!("{FOR_ONE} and not ({FOR_OTHER})")).await?;
    if skipped > 0 {
        return Ok(MoveResult::WouldSkip(skipped));
    }
    begin_reset(tx, consumer).await?;
    let copy = "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
                select $1, array[shard], array[last_id], old, old_id, old_at, new, new_id, new_at
                from pillarbox.shards() as slot (shard) cross join lateral pillarbox.latest_position($2, shard)";
    sqlx::query(copy).bind(consumer).bind(other).execute(tx).await?;
    Ok(MoveResult::Moved)
}

/// Whether the position of a consumer does not tell what it has processed.
async fn is_incomplete(tx: &mut PgConnection, consumer: &str) -> sqlx::Result<bool> {
    let query = "select exists (select from pillarbox.cursor where consumer = $1 and lapsed_at is not null)
                     or exists (select from pillarbox.filter_change where consumer = $1 and replay_from is not null)
                     or exists (select from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
                                where replay.consumer = $1 and not replay_shard.done)";
    sqlx::query_scalar(query).bind(consumer).fetch_one(tx).await
}

/// Conditions on a message: it matches the filter of the one consumer, and of the other.
const FOR_ONE: &str = "subject ~ one.included and (one.excluded is null or subject !~ one.excluded)";
const FOR_OTHER: &str = "subject ~ other.included and (other.excluded is null or subject !~ other.excluded)";

/// Returns the number of messages that `reader` has read and `behind` has not, of those that meet the condition, counted up to
/// 1,000. Both are `one` or `other`. Reads what `behind` has not read.
async fn count_between(
    tx: &mut PgConnection,
    (one, other): (&str, &str),
    reader: &str,
    behind: &str,
    condition: &str,
) -> sqlx::Result<i64> {
    let query = format!(
        "select count(*) from (
             select from pillarbox.cursor as one cross join pillarbox.cursor as other
             cross join pillarbox.shards() as slot (shard)
             cross join lateral pillarbox.latest_position({reader}.consumer, slot.shard) as read
             cross join lateral pillarbox.latest_position({behind}.consumer, slot.shard) as unread
             cross join lateral (
                 select log.id, log.xid, pillarbox.subject(log.source, log.topic, log.aggregate_type) as subject
                 from pillarbox.log where log.shard = slot.shard and log.id > unread.old_id
                 union all
                 -- Those that committed late have lower ids.
                 select log.id, log.xid, pillarbox.subject(log.source, log.topic, log.aggregate_type)
                 from pg_snapshot_xip(unread.old) as open (xid)
                 join pillarbox.log on log.xid = open.xid and log.shard = slot.shard and log.id <= unread.old_id
             ) message
             where one.consumer = $1 and other.consumer = $2 and {condition}
               and (pg_visible_in_snapshot(message.xid, read.old)
                    or (pg_visible_in_snapshot(message.xid, read.new) and message.id <= read.last_id))
               and not (pg_visible_in_snapshot(message.xid, unread.old)
                        or (pg_visible_in_snapshot(message.xid, unread.new) and message.id <= unread.last_id))
             limit 1000) as found"
    );
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(one).bind(other).fetch_one(tx).await
}

/// Whether a running process works for the consumer.
async fn is_in_use(tx: &mut PgConnection, consumer: &str) -> sqlx::Result<bool> {
    let query =
        "select exists (select from pillarbox.shard_worker join pillarbox.replica on replica.id = shard_worker.replica
                                where shard_worker.consumer = $1 and replica.until > now())";
    sqlx::query_scalar(query).bind(consumer).fetch_one(tx).await
}

/// The result of deleting a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteResult {
    /// It is deleted.
    Deleted {
        /// How many of its messages were parked and are dead letters now.
        dead_letters: u64,
    },
    /// There is no such consumer.
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
    if is_in_use(tx, consumer).await? {
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
    let dead_letters = parked_messages::give_up_all(tx, Some(consumer), "its consumer was dropped").await?;
    Ok(DeleteResult::Deleted { dead_letters })
}
