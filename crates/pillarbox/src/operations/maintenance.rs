//! Periodic maintenance: creates partitions ahead of time and deletes old data.

use std::time::Duration;

use chrono::{DateTime, Utc};
use runtime::worker::Round;
use sqlx::{PgConnection, PgPool};

use crate::consumers::{inbox, replica};
use crate::database::{cluster_identity, partition, time};
use crate::log;

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

/// Runs all maintenance once, by the database's time. `running_for` is the time since this process started to maintain. It
/// never blocks posts: if a lock is not available soon, the next run tries again. Returns `Busy` if there is more to
/// delete.
pub async fn run_once(db: &PgPool, retention: Retention, running_for: Duration) -> Result<Round, sqlx::Error> {
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
    let now = time::now(&mut db).await?;
    replica::delete_expired(&mut db).await?;
    if running_for >= CATCH_UP_TIME {
        lapse(&mut db, retention, now).await?;
    }
    drop_log_days(&mut db, retention, now).await?;
    drop_position_days(&mut db, now - days(retention.log_days + 1)).await?;
    let inbox_until = inbox_until(&mut db, now - days(retention.behind_days + 1)).await?;
    drop_inbox_days(&mut db, inbox_until).await?;
    drop_unrouted_days(&mut db, inbox_until).await?;
    let deleted = delete_expired_responses(&mut db, DELETE_MAX)
        .await?
        .max(delete_foreign_inbox(&mut db, inbox_until).await?)
        .max(delete_discarded(&mut db, inbox_until).await?)
        .max(delete_chosen_ids(&mut db, inbox_until).await?);
    delete_filter_changes(&mut db, inbox_until).await?;
    Ok(if deleted == DELETE_MAX as u64 { Round::Busy } else { Round::Idle })
}

/// Deletes up to `limit` responses to requests that are not repeated any more. Returns how many.
pub async fn delete_expired_responses(db: &mut PgConnection, limit: i64) -> sqlx::Result<u64> {
    let done = sqlx::query(
        "delete from pillarbox.idempotency where id in
             (select id from pillarbox.idempotency where expires_at <= now() order by expires_at limit $1)",
    )
    .bind(limit)
    .execute(db)
    .await?;
    Ok(done.rows_affected())
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
    // A hold that is not renewed, because its service is no longer run, must not keep the log for ever, so all are limited.
    // A margin of one hour: the time of a row is the clock's, which may have been set back since.
    let query = format!(
        "select least($1, (select min(old_at) - interval '1 hour' from ({LIVE_POSITIONS}) as live),
                      (select min(greatest(from_at, $2)) - interval '1 hour' from pillarbox.retention_hold),
                      (select min(greatest(replay_from, $2)) - interval '1 hour' from pillarbox.filter_change),
                      (select min(from_at) - interval '1 hour' from pillarbox.replay
                       where exists (select from pillarbox.replay_shard where replay = replay.id and not done)))"
    );
    let cutoff: DateTime<Utc> = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind(now - days(retention.log_days))
        .bind(now - days(retention.behind_days))
        .fetch_one(&mut *db)
        .await?;
    for partition in partition::days_before(db, "pillarbox.log", cutoff).await? {
        let Some(mut tx) = partition::lock_day(db, &partition).await? else { continue };
        // After the lock: no transaction can commit a row into this day between the check and the drop.
        if has_unread(&mut tx, &partition).await? {
            tx.rollback().await?;
            continue;
        }
        partition::drop_day(tx, "pillarbox.log", &partition).await?;
    }
    delete_log_overflow(db, cutoff - days(1)).await
}

/// Whether a consumer has not read some row of this day, although its position is later than the day: the row's transaction
/// committed late, or the database's clock was set back. Rows of a restored log are not read by their transaction ids.
async fn has_unread(tx: &mut PgConnection, partition: &str) -> sqlx::Result<bool> {
    let query = format!(
        "select exists (select from ({LIVE_POSITIONS}) as live cross join pg_snapshot_xip(live.old) as open (xid)
                        join {partition} as row on row.xid = open.xid)
             or exists (select from {partition} as row
                        where row.xid >= (select pg_snapshot_xmax(live.old) from ({LIVE_POSITIONS}) as live order by 1 limit 1)
                          and row.id > (select floor_id from pillarbox.cluster_identity))"
    );
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(tx).await
}

/// Deletes rows of the overflow partition from before `before` that every consumer has read.
async fn delete_log_overflow(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = format!(
        "with live as materialized ({LIVE_POSITIONS})
         delete from pillarbox.log_overflow where ctid in (
             select row.ctid from pillarbox.log_overflow as row
             where row.at < least($1, pillarbox.yesterday())
               and (row.id <= (select floor_id from pillarbox.cluster_identity)
                    or not exists (select from live where live.shard = row.shard
                                   and not pg_visible_in_snapshot(row.xid, live.old)))
             limit $2)"
    );
    sqlx::query(sqlx::AssertSqlSafe(query)).bind(before).bind(DELETE_MAX).execute(db).await.map(drop)
}

/// Drops the days of positions that ended before `until`. The positions of consumers that have not advanced since are copied
/// to today's partition, in the same transaction. They keep their numbers, so a position that a shard worker saves at the
/// same time is newer.
async fn drop_position_days(db: &mut PgConnection, until: DateTime<Utc>) -> sqlx::Result<()> {
    for partition in partition::days_before(db, "pillarbox.position", until).await? {
        let Some(mut tx) = partition::lock_day(db, &partition).await? else { continue };
        let query = format!(
            "insert into pillarbox.position (n, consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
             select n, consumer, array[shard], array[last_id], old, old_id, old_at, new, new_id, new_at
             from pillarbox.cursor cross join pillarbox.shards() as slot (shard)
             cross join lateral pillarbox.latest_position(consumer, shard)
             where partition_oid = '{partition}'::regclass"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(&mut *tx).await?;
        partition::drop_day(tx, "pillarbox.position", &partition).await?;
    }
    delete_position_overflow(db, until - days(1)).await
}

/// Deletes rows of the overflow partition from before `before` that are not the newest position of a consumer in any shard.
async fn delete_position_overflow(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "with newest as materialized (
                     select consumer, n from pillarbox.cursor cross join pillarbox.shards() as slot (shard)
                     cross join lateral pillarbox.latest_position(consumer, shard))
                 delete from pillarbox.position_overflow where ctid in (
                     select old.ctid from pillarbox.position_overflow as old
                     where old.at < least($1, pillarbox.yesterday())
                       and not exists (select from newest where newest.consumer = old.consumer and newest.n = old.n)
                     limit $2)";
    sqlx::query(query).bind(before).bind(DELETE_MAX).execute(db).await.map(drop)
}

/// Until when inboxes are deleted: `until`, but nothing whose message is still in the log, because a replay must find which
/// messages were processed. The id of a message may be older than its row in the log by the margin of the inbox.
async fn inbox_until(db: &mut PgConnection, until: DateTime<Utc>) -> sqlx::Result<DateTime<Utc>> {
    let query = "select least($1, (select min(at) from pillarbox.log_overflow),
                     (select min(to_date(right(relname, 8), 'YYYYMMDD')::timestamp at time zone 'UTC')
                      from pg_class join pg_inherits on inhrelid = pg_class.oid
                      where inhparent = 'pillarbox.log'::regclass and relname ~ '_[0-9]{8}$'))";
    let oldest: DateTime<Utc> = sqlx::query_scalar(query).bind(until).fetch_one(db).await?;
    Ok(until.min(oldest - inbox::ID_AGE_MAX))
}

/// Drops the days of the inboxes that ended before `until`.
async fn drop_inbox_days(db: &mut PgConnection, until: DateTime<Utc>) -> sqlx::Result<()> {
    for partition in partition::days_before(db, "pillarbox.inbox", until).await? {
        let Some(tx) = partition::lock_day(db, &partition).await? else { continue };
        partition::drop_day(tx, "pillarbox.inbox", &partition).await?;
    }
    let query = "delete from pillarbox.inbox_overflow where ctid in
                     (select ctid from pillarbox.inbox_overflow where message_id < pillarbox.uuid_at($1) limit $2)";
    sqlx::query(query).bind(until).bind(DELETE_MAX).execute(db).await.map(drop)
}

/// Drops the days of unrouted messages that ended before `until`.
async fn drop_unrouted_days(db: &mut PgConnection, until: DateTime<Utc>) -> sqlx::Result<()> {
    for partition in partition::days_before(db, "pillarbox.unrouted", until).await? {
        let Some(tx) = partition::lock_day(db, &partition).await? else { continue };
        partition::drop_day(tx, "pillarbox.unrouted", &partition).await?;
    }
    let query = "delete from pillarbox.unrouted_overflow where ctid in
                     (select ctid from pillarbox.unrouted_overflow where at < $1 limit $2)";
    sqlx::query(query).bind(until).bind(DELETE_MAX).execute(db).await.map(drop)
}

/// Deletes ids that producers have chosen, and whose messages the log no longer has. An id is not free while a consumer knows
/// it: the consumer would take a new message with this id for the old one.
async fn delete_chosen_ids(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<u64> {
    let query = "delete from pillarbox.chosen_id where message_id in (
                     select message_id from pillarbox.chosen_id as chosen
                     where at < $1
                       and not exists (select from pillarbox.dead_letter where dead_letter.message_id = chosen.message_id)
                       and not exists (select from pillarbox.cursor join pillarbox.parked using (consumer)
                                       where parked.message_id = chosen.message_id)
                       and not exists (select from pillarbox.cursor join pillarbox.inbox_foreign using (consumer)
                                       where inbox_foreign.message_id = chosen.message_id || '/0')
                     order by at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(DELETE_MAX).execute(db).await?.rows_affected())
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

/// Deletes the former filters of consumers that have not read with them since `before`.
async fn delete_filter_changes(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox.filter_change where read_to < $1 and replay_from is null";
    sqlx::query(query).bind(before).execute(db).await.map(drop)
}

fn days(count: u32) -> chrono::Duration {
    chrono::Duration::days(i64::from(count))
}
