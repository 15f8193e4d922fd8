use chrono::{DateTime, Utc};
use mailbox::{hold, partition};
use sqlx::{PgConnection, Row};

const FORGET_MAX: i64 = 10_000;
const COUNTED_MAX: i64 = 1_000;
/// Messages that are carried on at a time.
pub(crate) const CARRY_MAX: u64 = 10_000;

/// Makes partitions ahead; returns how many it made.
pub(crate) async fn make_partitions(db: &mut PgConnection) -> sqlx::Result<i32> {
    let query = "select pillarbox_hub.make_partitions($1)";
    let made = sqlx::query_scalar(query).bind(partition::DAYS_AHEAD).fetch_one(db).await;
    Ok(partition::unless_locked(made)?.unwrap_or(0))
}

/// When the oldest event was posted that a message waits for; None if all are settled. It may also be one that was settled
/// a moment ago.
pub(crate) async fn oldest_unsettled(db: &mut PgConnection) -> sqlx::Result<Option<DateTime<Utc>>> {
    sqlx::query_scalar(
        "select min(waiting.log_at)
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
         ) waiting",
    )
    .fetch_one(db)
    .await
}

/// Moves messages from before that still wait to the day of `now`, so that their own can go; returns how many. Nothing else
/// about them changes, and who reads them finds them by their number, as before.
pub(crate) async fn carry_on(db: &mut PgConnection, before: DateTime<Utc>, now: DateTime<Utc>) -> sqlx::Result<u64> {
    let query = "
        with waiting as (
            select made.subscriber, made.n from pillarbox_hub.subscriber
            left join lateral (select n from pillarbox_hub.position
                               where position.subscriber = subscriber.id order by n desc limit 1) newest on true
            cross join lateral (
                (select message.subscriber, message.n from pillarbox_hub.message
                 where message.subscriber = subscriber.id and n > coalesce(newest.n, 0) and at < $1
                   and not exists (select from pillarbox_hub.attempt where attempt.subscriber = message.subscriber
                                   and attempt.n = message.n and outcome <> 'failed')
                 limit $3)
                union
                -- The head of a lane that is blocked has died, and is waited for all the same.
                (select message.subscriber, message.n from pillarbox_hub.lane
                 join pillarbox_hub.message on message.subscriber = lane.subscriber
                      and (message.n = lane.head or (message.lane = lane.lane and message.n > lane.head))
                 where lane.subscriber = subscriber.id and message.at < $1
                   and (message.n = lane.head
                        or not exists (select from pillarbox_hub.attempt where attempt.subscriber = message.subscriber
                                       and attempt.n = message.n and outcome <> 'failed'))
                 limit $3)
            ) made
            limit $3)
        update pillarbox_hub.message set at = $2 from waiting
        where message.subscriber = waiting.subscriber and message.n = waiting.n and message.at < $1";
    let moved = sqlx::query(query).bind(before).bind(now).bind(CARRY_MAX as i64).execute(db).await?;
    Ok(moved.rows_affected())
}

/// Writes the positions down again that have not moved since before: of a day whose messages could not be dropped yet, what
/// was passed would be sent again without one.
pub(crate) async fn carry_positions(
    db: &mut PgConnection,
    before: DateTime<Utc>,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let query = "insert into pillarbox_hub.position (subscriber, n, at)
                 select subscriber.id, newest.n, $2 from pillarbox_hub.subscriber
                 cross join lateral (select n, at from pillarbox_hub.position
                                     where position.subscriber = subscriber.id order by n desc, at desc limit 1) newest
                 where newest.at < $1";
    sqlx::query(query).bind(before).bind(now).execute(db).await.map(drop)
}

/// The log is kept for messages that are not settled.
pub(crate) async fn hold_log(db: &mut PgConnection, from: Option<DateTime<Utc>>) -> sqlx::Result<()> {
    hold::set(db, "hub", from).await
}

/// Drops the days of these tables that ended before.
pub(crate) async fn drop_days(db: &mut PgConnection, tables: &[&str], cutoff: DateTime<Utc>) -> sqlx::Result<()> {
    for table in tables {
        let parent = format!("pillarbox_hub.{table}");
        for day in partition::days_before(db, &parent, cutoff).await? {
            partition::drop_day(db, &parent, &day).await?;
        }
        let overflow = format!(
            "delete from {parent}_overflow where ctid in (select ctid from {parent}_overflow where at < $1 limit $2)"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(overflow));
        query.bind(cutoff - chrono::Duration::days(1)).bind(FORGET_MAX).execute(&mut *db).await?;
    }
    Ok(())
}

/// Forgets what nobody follows any more, and what belonged to subscribers that are gone.
pub(crate) async fn forget(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    // The newest stays: it says which number is next.
    let query = "delete from pillarbox_hub.fanned where n_to in (
                     select n_to from pillarbox_hub.fanned
                     where at < $1 and n_to < (select max(n_to) from pillarbox_hub.fanned) order by n_to limit $2)";
    sqlx::query(query).bind(before).bind(FORGET_MAX).execute(&mut *db).await?;
    for table in ["lane", "command"] {
        let query = format!(
            "delete from pillarbox_hub.{table}
             where not exists (select from pillarbox_hub.subscriber where subscriber.id = {table}.subscriber)"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).execute(&mut *db).await?;
    }
    let query = "delete from pillarbox_hub.secret where expires_at < $1";
    let is_any = "select exists (select from pillarbox_hub.secret where expires_at < $1)";
    // Asked first: a statement that deletes nothing is a change for who follows the directory.
    if sqlx::query_scalar(is_any).bind(before).fetch_one(&mut *db).await? {
        sqlx::query(query).bind(before).execute(db).await?;
    }
    Ok(())
}

/// Forgets dead letters from before, but not one that its lane waits for.
pub(crate) async fn forget_dead_letters(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.dead_letter where id in (
                     select id from pillarbox_hub.dead_letter
                     where coalesce(manual_retry_at, moved_to_dlq_at) < $1
                       and not exists (select from pillarbox_hub.lane where lane.subscriber = dead_letter.subscriber
                                       and lane.head = dead_letter.n and lane.next_at is null)
                     limit $2)";
    sqlx::query(query).bind(before).bind(FORGET_MAX).execute(db).await.map(drop)
}

/// How many messages and lanes wait, and how many dead letters nobody has retried: of each up to a bound for each subscriber,
/// so that looking costs the same whatever has gathered.
pub(crate) async fn sizes(db: &mut PgConnection) -> sqlx::Result<(i64, i64)> {
    let row = sqlx::query(
        "select coalesce(sum(messages.count + lanes.count), 0)::bigint as pending, coalesce(sum(dead.count), 0)::bigint as dead
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
    .await?;
    Ok((row.try_get("pending")?, row.try_get("dead")?))
}
