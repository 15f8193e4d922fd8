//! Periodic maintenance: creates partitions ahead of time and deletes old data.

use std::time::Duration;

use chrono::{DateTime, Utc};
use kit::worker::Round;
use sqlx::{PgConnection, PgPool};

use crate::consumers::replica;
use crate::database::{cluster_identity, partition};
use crate::{idempotency, log};

/// The most rows that one statement deletes.
const DELETE_MAX: i64 = 10_000;

/// How long data is retained.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// How many days the log is retained.
    pub log_days: u32,
    /// A consumer that is further behind lapses: retention no longer waits for it.
    pub behind_days: u32,
}

impl Default for Retention {
    fn default() -> Retention {
        Retention { log_days: 7, behind_days: 14 }
    }
}

/// No consumer lapses during this time after maintenance started. If the whole installation was stopped for long, its
/// consumers can catch up first.
pub const CATCH_UP_TIME: Duration = Duration::from_secs(3_600);

/// Runs all maintenance once. `running_for` is the time since this process started to maintain. It never blocks posts:
/// if a lock is not available soon, the next run tries again. Returns `Busy` if there is more to delete.
pub async fn run_once(
    db: &PgPool,
    retention: Retention,
    now: DateTime<Utc>,
    running_for: Duration,
) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    let created =
        [log::create_partitions(&mut db, partition::DAYS_AHEAD).await, create_reader_partitions(&mut db).await];
    for created in created {
        if let Some(created @ 1..) = partition::unless_locked(created)? {
            tracing::info!(created, "created partitions");
        }
    }
    // Positions of another cluster mean nothing here, and the operator may still need all data.
    if cluster_identity::is_restored(&mut db).await? {
        return Ok(Round::Idle);
    }
    replica::delete_expired(&mut db).await?;
    if running_for >= CATCH_UP_TIME {
        lapse(&mut db, retention, now).await?;
    }
    drop_log_days(&mut db, retention, now).await?;
    drop_reader_days(&mut db, retention, now).await?;
    let inbox_until = now - days(retention.behind_days + 1);
    let deleted = idempotency::delete_expired(&mut db, now, DELETE_MAX)
        .await?
        .max(delete_foreign_inbox(&mut db, inbox_until).await?)
        .max(delete_discarded(&mut db, inbox_until).await?);
    Ok(if deleted == DELETE_MAX as u64 { Round::Busy } else { Round::Idle })
}

async fn create_reader_partitions(db: &mut PgConnection) -> sqlx::Result<i32> {
    sqlx::query_scalar("select pillarbox.make_reader_partitions($1)").bind(partition::DAYS_AHEAD).fetch_one(db).await
}

/// The newest positions of all consumers that have not lapsed: the old snapshot, its time, and the last id.
const LIVE_POSITIONS: &str = "
    select cursor.consumer, shard, cursor.since, coalesce(latest.old_at, 'epoch') as old_at,
           greatest(latest.old_id, latest.last_id, 0) as read_id, coalesce(latest.old, '3:3:'::pg_snapshot) as old
    from pillarbox.cursor
    cross join pillarbox.shards() as slot (shard)
    left join lateral pillarbox.latest_position(cursor.consumer, shard) as latest on true
    where cursor.lapsed_at is null";

/// Lapses the consumers that are too far behind.
async fn lapse(db: &mut PgConnection, retention: Retention, now: DateTime<Utc>) -> sqlx::Result<()> {
    let query = format!(
        "update pillarbox.cursor set lapsed_at = $1
         where consumer in (
             select consumer from ({LIVE_POSITIONS}) as live
             where greatest(old_at, since) < $2
               and exists (select from pillarbox.log where log.shard = live.shard and log.id > live.read_id))
         returning consumer"
    );
    let lapsed: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind(now)
        .bind(now - days(retention.behind_days))
        .fetch_all(db)
        .await?;
    for consumer in lapsed {
        tracing::error!(
            consumer,
            days = retention.behind_days,
            "a consumer lapsed because it was too far behind: retention no longer waits for it; \
             run `pillarbox cursors reset` or `pillarbox cursors drop`"
        );
    }
    Ok(())
}

/// Drops the days of the log that are old enough and that every consumer has read.
async fn drop_log_days(db: &mut PgConnection, retention: Retention, now: DateTime<Utc>) -> sqlx::Result<()> {
    // A margin of one hour: the time of a row is the clock's, which may have been set back since.
    let query = format!(
        "select least($1, (select min(old_at) - interval '1 hour' from ({LIVE_POSITIONS}) as live),
                      (select min(from_at) - interval '1 hour' from pillarbox.retention_hold),
                      (select min(from_at) - interval '1 hour' from pillarbox.replay
                       where exists (select from pillarbox.replay_shard where replay = replay.id and not done)))"
    );
    let cutoff: DateTime<Utc> =
        sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(now - days(retention.log_days)).fetch_one(&mut *db).await?;
    for partition in partition::days_before(db, "pillarbox.log", cutoff).await? {
        // A transaction that was in progress at a consumer's old snapshot may have inserted rows into this day.
        let query = format!(
            "select exists (select from ({LIVE_POSITIONS}) as live cross join pg_snapshot_xip(live.old) as open (xid)
                            join {partition} as row on row.xid = open.xid)"
        );
        if sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&mut *db).await? {
            continue;
        }
        partition::drop_day(db, "pillarbox.log", &partition).await?;
    }
    let query = "delete from pillarbox.log_overflow where ctid in
                     (select ctid from pillarbox.log_overflow where at < $1 limit $2)";
    sqlx::query(query).bind(cutoff - days(1)).bind(DELETE_MAX).execute(db).await.map(drop)
}

/// Drops the days of positions and inboxes that are old enough.
async fn drop_reader_days(db: &mut PgConnection, retention: Retention, now: DateTime<Utc>) -> sqlx::Result<()> {
    let positions_until = now - days(retention.log_days + 1);
    for partition in partition::days_before(db, "pillarbox.position", positions_until).await? {
        // The position of a consumer that has not advanced since is copied to today's partition, with its old number: a
        // position that a shard worker saves meanwhile is newer.
        let query = format!(
            "insert into pillarbox.position (n, consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
             select n, consumer, array[shard], array[last_id], old, old_id, old_at, new, new_id, new_at
             from pillarbox.cursor cross join pillarbox.shards() as slot (shard)
             cross join lateral pillarbox.latest_position(consumer, shard)
             where partition_oid = '{partition}'::regclass"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(&mut *db).await?;
        partition::drop_day(db, "pillarbox.position", &partition).await?;
    }
    let inbox_until = now - days(retention.behind_days + 1);
    for partition in partition::days_before(db, "pillarbox.inbox", inbox_until).await? {
        partition::drop_day(db, "pillarbox.inbox", &partition).await?;
    }
    let query = "delete from pillarbox.inbox_overflow where ctid in
                     (select ctid from pillarbox.inbox_overflow where message_id < pillarbox.uuid_at($1) limit $2)";
    sqlx::query(query).bind(inbox_until).bind(DELETE_MAX).execute(db).await.map(drop)
}

async fn delete_foreign_inbox(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<u64> {
    let query = "delete from pillarbox.inbox_foreign where (consumer, message_id) in
                     (select consumer, message_id from pillarbox.inbox_foreign where at < $1 order by at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(DELETE_MAX).execute(db).await?.rows_affected())
}

async fn delete_discarded(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<u64> {
    let query = "delete from pillarbox.discarded where (consumer, message_id) in
                     (select consumer, message_id from pillarbox.discarded where discarded_at < $1
                      order by discarded_at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(DELETE_MAX).execute(db).await?.rows_affected())
}

fn days(count: u32) -> chrono::Duration {
    chrono::Duration::days(i64::from(count))
}
