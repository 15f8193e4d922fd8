//! Maintenance of the hub's tables: partitions, retention and sizes.

use chrono::{DateTime, Duration, Utc};
use pillarbox::database::partition;
use pillarbox::operations::retention_hold;
use sqlx::PgConnection;

/// Rows that one statement deletes at most.
const DELETED_MAX: i64 = 10_000;
/// Rows that are counted at most, for each subscriber and table.
const COUNTED_MAX: i64 = 1_000;
/// Messages that one call of [`move_pending`] moves at most.
pub(crate) const MOVED_MAX: u64 = 10_000;

/// Creates partitions ahead. Returns how many it created; 0 if a lock prevents it, in which case the next call tries again.
pub(crate) async fn create_partitions(db: &mut PgConnection) -> sqlx::Result<i32> {
    let query = "select pillarbox_hub.make_partitions($1)";
    let created = sqlx::query_scalar(query).bind(partition::DAYS_AHEAD).fetch_one(db).await;
    Ok(partition::unless_locked(created)?.unwrap_or(0))
}

/// When the oldest event with a pending message was posted; None if no message is pending. It may be too old, because
/// positions are saved with a delay.
pub(crate) async fn oldest_pending(db: &mut PgConnection) -> sqlx::Result<Option<DateTime<Utc>>> {
    sqlx::query_scalar(
        "select least(min(pending.log_at), (select min(log_at) from pillarbox_hub.deferred_event))
         from pillarbox_hub.subscriber
         left join lateral (select n from pillarbox_hub.position
                            where position.subscriber = subscriber.id order by n desc limit 1) newest on true
         cross join lateral (
             (select log_at from pillarbox_hub.message
              where message.subscriber = subscriber.id and n > coalesce(newest.n, 0) order by n limit 1)
             union all
             (select log_at from pillarbox_hub.lane
              join pillarbox_hub.message on message.subscriber = lane.subscriber and message.n = lane.head
              where lane.subscriber = subscriber.id)
         ) pending",
    )
    .fetch_one(db)
    .await
}

/// Moves pending messages from before `before` to the day of `now`, so that their own day can be dropped. Returns how many
/// it moved. Dispatchers find messages by their numbers, which do not change.
pub(crate) async fn move_pending(
    db: &mut PgConnection,
    before: DateTime<Utc>,
    now: DateTime<Utc>,
) -> sqlx::Result<u64> {
    let query = "
        with pending as (
            select candidate.subscriber, candidate.n from pillarbox_hub.subscriber
            left join lateral (select n from pillarbox_hub.position
                               where position.subscriber = subscriber.id order by n desc limit 1) newest on true
            cross join lateral (
                (select message.subscriber, message.n from pillarbox_hub.message
                 where message.subscriber = subscriber.id and n > coalesce(newest.n, 0) and at < $1
                   and not exists (select from pillarbox_hub.attempt where attempt.subscriber = message.subscriber
                                   and attempt.n = message.n and outcome <> 'failed')
                 limit $3)
                union
                -- The head of a blocked lane has a final outcome, but the lane still needs it.
                (select message.subscriber, message.n from pillarbox_hub.lane
                 join pillarbox_hub.message on message.subscriber = lane.subscriber
                      and (message.n = lane.head or (message.lane = lane.lane and message.n > lane.head))
                 where lane.subscriber = subscriber.id and message.at < $1
                   and (message.n = lane.head
                        or not exists (select from pillarbox_hub.attempt where attempt.subscriber = message.subscriber
                                       and attempt.n = message.n and outcome <> 'failed'))
                 limit $3)
            ) candidate
            limit $3)
        update pillarbox_hub.message set at = $2 from pending
        where message.subscriber = pending.subscriber and message.n = pending.n and message.at < $1";
    let moved = sqlx::query(query).bind(before).bind(now).bind(MOVED_MAX as i64).execute(db).await?;
    Ok(moved.rows_affected())
}

/// Holds the log from this time on, for pending messages.
pub(crate) async fn set_retention_hold(db: &mut PgConnection, from: Option<DateTime<Utc>>) -> sqlx::Result<()> {
    retention_hold::set(db, "hub", from).await
}

/// Drops the partitions of these tables that end before `cutoff`.
pub(crate) async fn drop_days(db: &mut PgConnection, tables: &[&str], cutoff: DateTime<Utc>) -> sqlx::Result<()> {
    for table in tables {
        let parent = format!("pillarbox_hub.{table}");
        for day in partition::days_before(db, &parent, cutoff).await? {
            let Some(tx) = partition::lock_day(db, &day).await? else { continue };
            partition::drop_day(tx, &parent, &day).await?;
        }
        let overflow = format!(
            "delete from {parent}_overflow where ctid in (
                 select ctid from {parent}_overflow where at < least($1, pillarbox.yesterday()) limit $2)"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(overflow));
        query.bind(cutoff - Duration::days(1)).bind(DELETED_MAX).execute(&mut *db).await?;
    }
    Ok(())
}

/// The newest position of each subscriber.
const NEWEST_POSITIONS: &str = "
    select subscriber.id, newest.n, newest.stored_in from pillarbox_hub.subscriber
    cross join lateral (select n, tableoid as stored_in from pillarbox_hub.position
                        where position.subscriber = subscriber.id order by n desc, at desc limit 1) newest";

/// Drops the positions from before `cutoff`, except the newest one of each subscriber, which is copied to today's partition
/// in the same transaction. If it were dropped while messages before it still exist, those messages would be sent again.
pub(crate) async fn drop_positions(db: &mut PgConnection, cutoff: DateTime<Utc>) -> sqlx::Result<()> {
    let parent = "pillarbox_hub.position";
    for day in partition::days_before(db, parent, cutoff).await? {
        let Some(mut tx) = partition::lock_day(db, &day).await? else { continue };
        let copy = format!(
            "insert into {parent} (subscriber, n, at)
             select id, n, clock_timestamp() from ({NEWEST_POSITIONS}) as newest where stored_in = '{day}'::regclass"
        );
        sqlx::query(sqlx::AssertSqlSafe(copy)).execute(&mut *tx).await?;
        partition::drop_day(tx, parent, &day).await?;
    }
    let overflow = format!(
        "delete from {parent}_overflow where ctid in (
             select old.ctid from {parent}_overflow as old
             where at < least($1, pillarbox.yesterday())
               and not exists (select from ({NEWEST_POSITIONS}) as newest where id = old.subscriber and n = old.n)
             limit $2)"
    );
    let query = sqlx::query(sqlx::AssertSqlSafe(overflow));
    query.bind(cutoff - Duration::days(1)).bind(DELETED_MAX).execute(db).await.map(drop)
}

/// Deletes batches of fan-out and secrets from before `before`, and the lanes and commands of deleted subscribers.
pub(crate) async fn delete_obsolete(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    // The newest batch stays: the next hub message gets the number after it.
    let query = "delete from pillarbox_hub.fanout_batch where n_to in (
                     select n_to from pillarbox_hub.fanout_batch
                     where at < $1 and n_to < (select max(n_to) from pillarbox_hub.fanout_batch) order by n_to limit $2)";
    sqlx::query(query).bind(before).bind(DELETED_MAX).execute(&mut *db).await?;
    for table in ["lane", "command"] {
        let query = format!(
            "delete from pillarbox_hub.{table}
             where not exists (select from pillarbox_hub.subscriber where subscriber.id = {table}.subscriber)"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(&mut *db).await?;
    }
    let query = "delete from pillarbox_hub.secret where expires_at < $1";
    let exists = "select exists (select from pillarbox_hub.secret where expires_at < $1)";
    // Check first: even a statement that deletes nothing fires the trigger that counts changes of the directory.
    if sqlx::query_scalar(exists).bind(before).fetch_one(&mut *db).await? {
        sqlx::query(query).bind(before).execute(db).await?;
    }
    Ok(())
}

/// Deletes dead letters from before `before`, except those that block a lane.
pub(crate) async fn delete_dead_letters(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.dead_letter where id in (
                     select id from pillarbox_hub.dead_letter
                     where coalesce(manual_retry_at, moved_to_dlq_at) < $1
                       and not exists (select from pillarbox_hub.lane where lane.subscriber = dead_letter.subscriber
                                       and lane.head = dead_letter.n and lane.next_at is null)
                     limit $2)";
    sqlx::query(query).bind(before).bind(DELETED_MAX).execute(db).await.map(drop)
}

/// The number of messages that nothing holds back and that were created more than `age` ago without being sent: their
/// subscriber is active, verified and not paused, its tenant is not suspended, and no earlier message of their lane waits. At
/// most [`COUNTED_MAX`] per subscriber are examined, which bounds the cost of the query.
pub(crate) async fn stale(db: &mut PgConnection, age: Duration) -> sqlx::Result<i64> {
    sqlx::query_scalar(
        "select coalesce(sum(stale.count), 0)::bigint
         from pillarbox_hub.subscriber
         left join lateral (select n from pillarbox_hub.position
                            where position.subscriber = subscriber.id order by n desc limit 1) newest on true
         cross join lateral (
             select count(*) from (
                 select n, lane, at from pillarbox_hub.message
                 where message.subscriber = subscriber.id and n > coalesce(newest.n, 0) and at < now() - $1::interval
                 order by n limit $2
             ) as old
             where not exists (select from pillarbox_hub.attempt
                               where attempt.subscriber = subscriber.id and attempt.n = old.n
                                 and attempt.at >= old.at - interval '1 hour')
               and not exists (select from pillarbox_hub.lane
                               where lane.subscriber = subscriber.id and lane.lane = old.lane)
         ) stale
         where subscriber.is_active and subscriber.paused_at is null
           and subscriber.unverified_since is null
           and not exists (select from pillarbox.tenant where tenant.name = subscriber.tenant and suspended_at is not null)",
    )
    .bind(age)
    .bind(COUNTED_MAX)
    .fetch_one(db)
    .await
}

/// How much the hub has to do.
#[derive(sqlx::FromRow)]
pub(crate) struct Sizes {
    /// Pending messages and detached lanes.
    pub(crate) pending: i64,
    /// Dead letters that were not retried.
    pub(crate) dead: i64,
}

/// Measures how much the hub has to do. Each kind is counted up to
/// [`COUNTED_MAX`] per subscriber, which bounds the cost of the query.
pub(crate) async fn sizes(db: &mut PgConnection) -> sqlx::Result<Sizes> {
    sqlx::query_as(
        "select (coalesce(sum(messages.count + lanes.count), 0)
                 + (select coalesce(sum(matches), 0) from (select matches from pillarbox_hub.deferred_event limit $1) as deferred)
                )::bigint as pending,
                coalesce(sum(dead.count), 0)::bigint as dead
         from pillarbox_hub.subscriber
         left join lateral (select n from pillarbox_hub.position
                            where position.subscriber = subscriber.id order by n desc limit 1) newest on true
         cross join lateral (
             select count(*) from (select from pillarbox_hub.message
                                   where message.subscriber = subscriber.id and n > coalesce(newest.n, 0) limit $1) as counted
         ) messages
         cross join lateral (
             select count(*) from (select from pillarbox_hub.lane where lane.subscriber = subscriber.id limit $1) as counted
         ) lanes
         cross join lateral (
             select count(*) from (select from pillarbox_hub.dead_letter
                                   where dead_letter.subscriber = subscriber.id and manual_retry_at is null limit $1) as counted
         ) dead",
    )
    .bind(COUNTED_MAX)
    .fetch_one(db)
    .await
}
