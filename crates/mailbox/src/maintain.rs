//! What the log needs now and then: partitions ahead, and an end for what is old.

use std::time::Duration;

use chrono::{DateTime, Utc};
use kit::worker::Round;
use sqlx::{PgConnection, PgPool};

use crate::{home, idempotency, log, partition, replica};

const FORGET_MAX: i64 = 10_000;

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

/// Consumers that come back after a long time, all of them with the whole installation, say, have so long to catch up before
/// one is given up.
pub const PATIENCE: Duration = Duration::from_secs(3_600);

/// One round of everything, by who has been at it for so long. No post waits for it: where it cannot have a lock soon, the
/// next round is soon enough.
pub async fn round(db: &PgPool, keep: Keep, now: DateTime<Utc>, at_it_for: Duration) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    for made in [log::make_partitions(&mut db, partition::DAYS_AHEAD).await, make_reader_partitions(&mut db).await] {
        if let Some(made @ 1..) = partition::unless_locked(made)? {
            tracing::info!(made, "made partitions");
        }
    }
    // Times and places of another cluster mean nothing here, and its operator may still want all of it.
    if home::is_restored(&mut db).await? {
        return Ok(Round::Idle);
    }
    replica::forget_gone(&mut db).await?;
    if at_it_for >= PATIENCE {
        lapse(&mut db, keep, now).await?;
    }
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
    sqlx::query_scalar("select pillarbox.make_reader_partitions($1)").bind(partition::DAYS_AHEAD).fetch_one(db).await
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
    for partition in partition::days_before(db, "pillarbox.log", cutoff).await? {
        // A transaction that was open when a consumer looked may have written here.
        let query = format!(
            "select exists (select from ({LIVE_PLACES}) as place cross join pg_snapshot_xip(place.old) as open (xid)
                            join {partition} as row on row.xid = open.xid)"
        );
        if sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&mut *db).await? {
            continue;
        }
        partition::drop_day(db, "pillarbox.log", &partition).await?;
    }
    let query = "delete from pillarbox.log_overflow where ctid in
                     (select ctid from pillarbox.log_overflow where at < $1 limit $2)";
    sqlx::query(query).bind(cutoff - days(1)).bind(FORGET_MAX).execute(db).await.map(drop)
}

async fn drop_reader_days(db: &mut PgConnection, keep: Keep, now: DateTime<Utc>) -> sqlx::Result<()> {
    let positions_until = now - days(keep.log_days + 1);
    for partition in partition::days_before(db, "pillarbox.position", positions_until).await? {
        // A consumer that has not moved since keeps its place.
        let query = format!(
            // Under its old number: what a lane writes meanwhile is newer.
            "insert into pillarbox.position (n, consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
             select n, consumer, array[shard], array[last_id], old, old_id, old_at, new, new_id, new_at
             from pillarbox.cursor cross join pillarbox.shards() as slot (shard)
             cross join lateral pillarbox.place(consumer, shard)
             where kept_in = '{partition}'::regclass"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(&mut *db).await?;
        partition::drop_day(db, "pillarbox.position", &partition).await?;
    }
    let inbox_until = now - days(keep.behind_days + 1);
    for partition in partition::days_before(db, "pillarbox.inbox", inbox_until).await? {
        partition::drop_day(db, "pillarbox.inbox", &partition).await?;
    }
    let query = "delete from pillarbox.inbox_overflow where ctid in
                     (select ctid from pillarbox.inbox_overflow where message_id < pillarbox.uuid_at($1) limit $2)";
    sqlx::query(query).bind(inbox_until).bind(FORGET_MAX).execute(db).await.map(drop)
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

fn days(count: u32) -> chrono::Duration {
    chrono::Duration::days(i64::from(count))
}
