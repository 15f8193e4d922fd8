//! Maintenance of the messages of streams: partitions, retention and lag.

use chrono::{DateTime, Duration, Utc};
use pillarbox::database::partition;
use sqlx::PgConnection;

use crate::streams::store::COUNTED_MAX;

const PARENT: &str = "pillarbox_hub.stream_message";
/// Rows that one statement deletes at most.
const DELETED_MAX: i64 = 10_000;

/// The streams together, as metrics show them.
#[derive(sqlx::FromRow)]
pub(crate) struct StreamLag {
    /// At most [`COUNTED_MAX`] per part.
    pub(crate) messages: i64,
    /// The age of the oldest message that is not acknowledged.
    pub(crate) seconds: f64,
    /// The streams with a part whose position has lapsed.
    pub(crate) lapsed: i64,
}

/// When the oldest event was posted of which a stream has an unacknowledged message; None if there is none.
pub(crate) async fn oldest_unread(db: &mut PgConnection) -> sqlx::Result<Option<DateTime<Utc>>> {
    sqlx::query_scalar(
        "select min(waiting.at) from pillarbox_hub.stream_part as part
         cross join lateral (
             select at from pillarbox_hub.stream_message as message
             where message.stream = part.stream and message.part = part.part and n > part.acknowledged
             order by n limit 1
         ) waiting",
    )
    .fetch_one(db)
    .await
}

/// Drops the days that end before `cutoff`. In the same transaction, each part records what it has lost: its reader is
/// refused until an operator decides where to continue.
pub(crate) async fn drop_days(db: &mut PgConnection, cutoff: DateTime<Utc>) -> sqlx::Result<()> {
    for day in partition::days_before(db, PARENT, cutoff).await? {
        let Some(mut tx) = partition::lock_day(db, &day).await? else { continue };
        // The names of partitions need no quoting, and end with their day.
        let lost = format!(
            "update pillarbox_hub.stream_part as part
             set dropped_to = coalesce((select max(n) from {day} as message
                                        where message.stream = part.stream and message.part = part.part
                                          and n > part.acknowledged), dropped_to),
                 dropped_before = (to_date(right('{day}', 8), 'YYYYMMDD') + 1)::timestamp at time zone 'UTC'
             where exists (select from {day} as message
                           where message.stream = part.stream and message.part = part.part)"
        );
        let recorded = sqlx::query(sqlx::AssertSqlSafe(lost)).execute(&mut *tx).await;
        // A pull that has locked the parts for too long; the next maintenance run tries again.
        if partition::unless_locked(recorded)?.is_none() {
            tx.rollback().await?;
            continue;
        }
        partition::drop_day(tx, PARENT, &day).await?;
    }
    drop_overflow(db, cutoff - Duration::days(1)).await
}

/// The same for rows without a partition: a CTE that deletes and updates is one transaction.
async fn drop_overflow(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "
        with deleted as (
            delete from pillarbox_hub.stream_message_overflow where ctid in (
                select ctid from pillarbox_hub.stream_message_overflow
                where at < least($1, pillarbox.yesterday()) limit $2)
            returning stream, part, n, at),
        lost as (select stream, part, max(n) as n, max(at) as at from deleted group by stream, part),
        -- In the order in which pulls lock them.
        locked as (select part.stream, part.part from pillarbox_hub.stream_part as part join lost using (stream, part)
                   order by part.stream, part.part for update of part)
        update pillarbox_hub.stream_part as part
        set dropped_to = case when lost.n > part.acknowledged then greatest(lost.n, part.dropped_to) else part.dropped_to end,
            dropped_before = greatest(lost.at, part.dropped_before)
        from lost join locked using (stream, part) where lost.stream = part.stream and lost.part = part.part";
    sqlx::query(query).bind(before).bind(DELETED_MAX).execute(db).await.map(drop)
}

/// Deletes batches of fan-out from before `before`, except the newest: the next stream message gets the number after it.
pub(crate) async fn delete_batches(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.stream_batch where n_to in (
                     select n_to from pillarbox_hub.stream_batch
                     where at < $1 and n_to < (select max(n_to) from pillarbox_hub.stream_batch) order by n_to limit $2)";
    sqlx::query(query).bind(before).bind(DELETED_MAX).execute(db).await.map(drop)
}

/// Measures the lag of all streams together.
pub(crate) async fn lag(db: &mut PgConnection) -> sqlx::Result<StreamLag> {
    sqlx::query_as(
        "select coalesce(sum(waiting.messages), 0)::bigint as messages,
                coalesce(extract(epoch from clock_timestamp() - min(waiting.oldest_at)), 0)::float8 as seconds,
                count(distinct part.stream) filter (where part.acknowledged < part.dropped_to) as lapsed
         from pillarbox_hub.stream_part as part
         cross join lateral (
             select count(*) as messages, min(at) as oldest_at from (
                 select at from pillarbox_hub.stream_message as message
                 where message.stream = part.stream and message.part = part.part and n > part.acknowledged
                 order by n limit $1) as counted
         ) waiting",
    )
    .bind(COUNTED_MAX)
    .fetch_one(db)
    .await
}
