//! What the log needs now and then: partitions ahead, and an end for what is old.

use chrono::{DateTime, Utc};
use kit::worker::Round;
use sqlx::{Acquire, PgConnection, PgPool};

use crate::{home, idempotency, log, replica};

/// With so many days made ahead, a week without anybody maintaining costs nothing; then messages overflow, and are kept.
const DAYS_AHEAD: i32 = 7;

const FORGET_MAX: i64 = 10_000;

/// PostgreSQL's code for a lock that was not to be had in time.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// How long things are kept.
#[derive(Debug, Clone, Copy)]
pub struct Keep {
    pub log_days: u32,
    /// A consumer that is further behind holds nothing back any more.
    pub behind_days: u32,
}

impl Default for Keep {
    fn default() -> Keep {
        Keep { log_days: 7, behind_days: 14 }
    }
}

/// One round of everything. No post waits for it: where it cannot have a lock soon, the next round is soon enough.
pub async fn round(db: &PgPool, keep: Keep, now: DateTime<Utc>) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    for made in [log::make_partitions(&mut db, DAYS_AHEAD).await, make_reader_partitions(&mut db).await] {
        if let Some(made @ 1..) = unless_locked(made)? {
            tracing::info!(made, "made partitions");
        }
    }
    // Times and places of another cluster mean nothing here, and its operator may still want all of it.
    if home::is_restored(&mut db).await? {
        return Ok(Round::Idle);
    }
    replica::forget_gone(&mut db).await?;
    lapse(&mut db, keep, now).await?;
    drop_log_days(&mut db, keep, now).await?;
    drop_reader_days(&mut db, keep, now).await?;
    let long_ago = now - days(keep.behind_days + 1);
    let forgotten = idempotency::forget_expired(&mut db, now, FORGET_MAX)
        .await?
        .max(forget_foreign(&mut db, long_ago).await?)
        .max(forget_discarded(&mut db, long_ago).await?);
    Ok(if forgotten == FORGET_MAX as u64 { Round::Busy } else { Round::Idle })
}

async fn make_reader_partitions(db: &mut PgConnection) -> sqlx::Result<i32> {
    sqlx::query_scalar("select pillarbox.make_reader_partitions($1)").bind(DAYS_AHEAD).fetch_one(db).await
}

/// The newest place of every consumer that still counts: the time of its old moment, and that moment's snapshot.
const LIVE_PLACES: &str = "
    select cursor.consumer, shard, cursor.since, coalesce(place.old_at, 'epoch') as old_at,
           greatest(place.old_id, place.last_id, 0) as read_id, coalesce(place.old, '3:3:'::pg_snapshot) as old
    from pillarbox.cursor
    cross join pillarbox.shards() as slot (shard)
    left join lateral pillarbox.place(cursor.consumer, shard) on true
    where cursor.lapsed_at is null";

async fn lapse(db: &mut PgConnection, keep: Keep, now: DateTime<Utc>) -> sqlx::Result<()> {
    let query = format!(
        "update pillarbox.cursor set lapsed_at = $1
         where consumer in (
             select consumer from ({LIVE_PLACES}) as place
             where greatest(old_at, since) < $2
               and exists (select from pillarbox.log where log.shard = place.shard and log.id > place.read_id))
         returning consumer"
    );
    let lapsed: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind(now)
        .bind(now - days(keep.behind_days))
        .fetch_all(db)
        .await?;
    for consumer in lapsed {
        tracing::error!(
            consumer,
            days = keep.behind_days,
            "a consumer has been behind for too long, and lapses: the log is no longer kept for it; \
             `pillarbox cursors reset` or `drop` it"
        );
    }
    Ok(())
}

/// Drops the days that are old enough and that every consumer has passed.
async fn drop_log_days(db: &mut PgConnection, keep: Keep, now: DateTime<Utc>) -> sqlx::Result<()> {
    // An hour's margin: a row's time is the clock's, which may have been set back since.
    let query = format!(
        "select least($1, (select min(old_at) - interval '1 hour' from ({LIVE_PLACES}) as place),
                      (select min(from_at) - interval '1 hour' from pillarbox.hold),
                      (select min(from_at) - interval '1 hour' from pillarbox.replay
                       where exists (select from pillarbox.replay_shard where replay = replay.id and not done)))"
    );
    let cutoff: DateTime<Utc> =
        sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(now - days(keep.log_days)).fetch_one(&mut *db).await?;
    for partition in days_before(db, "log", cutoff).await? {
        // A transaction that was open when a consumer looked may have written here.
        let query = format!(
            "select exists (select from ({LIVE_PLACES}) as place cross join pg_snapshot_xip(place.old) as open (xid)
                            join pillarbox.{partition} as row on row.xid = open.xid)"
        );
        if sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&mut *db).await? {
            continue;
        }
        drop_day(db, "log", &partition).await?;
    }
    let query = "delete from pillarbox.log_overflow where ctid in
                     (select ctid from pillarbox.log_overflow where at < $1 limit $2)";
    sqlx::query(query).bind(cutoff - days(1)).bind(FORGET_MAX).execute(db).await.map(drop)
}

async fn drop_reader_days(db: &mut PgConnection, keep: Keep, now: DateTime<Utc>) -> sqlx::Result<()> {
    let positions_until = now - days(keep.log_days + 1);
    for partition in days_before(db, "position", positions_until).await? {
        // A consumer that has not moved since keeps its place.
        let query = format!(
            // Under its old number: what a lane writes meanwhile is newer.
            "insert into pillarbox.position (n, consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
             select n, consumer, array[shard], array[last_id], old, old_id, old_at, new, new_id, new_at
             from pillarbox.cursor cross join pillarbox.shards() as slot (shard)
             cross join lateral pillarbox.place(consumer, shard)
             where kept_in = 'pillarbox.{partition}'::regclass"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(&mut *db).await?;
        drop_day(db, "position", &partition).await?;
    }
    let inbox_until = now - days(keep.behind_days + 1);
    for partition in days_before(db, "inbox", inbox_until).await? {
        drop_day(db, "inbox", &partition).await?;
    }
    let query = "delete from pillarbox.inbox_overflow where ctid in
                     (select ctid from pillarbox.inbox_overflow where message_id < pillarbox.uuid_at($1) limit $2)";
    sqlx::query(query).bind(inbox_until).bind(FORGET_MAX).execute(db).await.map(drop)
}

/// The partitions of days that ended before `cutoff`, oldest first. Their names are ours, and hold nothing but letters,
/// digits and `_`.
async fn days_before(db: &mut PgConnection, parent: &str, cutoff: DateTime<Utc>) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar(
        "select relname::text from pg_class join pg_inherits on inhrelid = pg_class.oid
         where inhparent = ('pillarbox.' || $1)::regclass and relname ~ ('^' || $1 || '_[0-9]{8}$')
           and to_date(right(relname, 8), 'YYYYMMDD') + 1 <= ($2 at time zone 'UTC')::date
         order by relname",
    )
    .bind(parent)
    .bind(cutoff)
    .fetch_all(db)
    .await
}

/// Drops one partition. It needs the table for a moment; while it waits for a long reader, posts wait behind it, so it
/// waits no longer than nobody notices.
async fn drop_day(db: &mut PgConnection, parent: &str, partition: &str) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    let statements = format!(
        "set local lock_timeout = '100ms';
         alter table pillarbox.{parent} detach partition pillarbox.{partition};
         drop table pillarbox.{partition}"
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

async fn forget_foreign(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<u64> {
    let query = "delete from pillarbox.inbox_foreign where (consumer, message_id) in
                     (select consumer, message_id from pillarbox.inbox_foreign where at < $1 order by at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(FORGET_MAX).execute(db).await?.rows_affected())
}

async fn forget_discarded(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<u64> {
    let query = "delete from pillarbox.discarded where (consumer, message_id) in
                     (select consumer, message_id from pillarbox.discarded where discarded_at < $1
                      order by discarded_at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(FORGET_MAX).execute(db).await?.rows_affected())
}

/// None if someone else holds the lock.
fn unless_locked<T>(outcome: sqlx::Result<T>) -> sqlx::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => Ok(None),
        Err(error) => Err(error),
    }
}

fn days(count: u32) -> chrono::Duration {
    chrono::Duration::days(i64::from(count))
}
