//! Translates a time into an id of the log, by binary search.
//!
//! The log has no index on time, because every index slows down every post. It has one on (shard, id), and ids grow
//! with time.

use chrono::{DateTime, Duration, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

/// The binary search ends when this many ids are left.
const IDS_LEFT: i64 = 1_000;
/// By how much the order of times may differ from the order of ids: an allowance for clock skew and clock adjustments.
pub(crate) const MARGIN: Duration = Duration::minutes(1);

/// Returns the time inside a UUID of version 7; None for other versions.
pub fn created_at(id: Uuid) -> Option<DateTime<Utc>> {
    let milliseconds = (id.as_u128() >> 80) as i64;
    (id.get_version_num() == 7).then(|| DateTime::from_timestamp_millis(milliseconds)).flatten()
}

/// Returns an id close to `time`. Every message of the shard with a lower id was posted before `time`.
pub(crate) async fn first_since(db: &mut PgConnection, shard: i16, time: DateTime<Utc>) -> sqlx::Result<i64> {
    Ok(around(db, Some(shard), time - MARGIN).await?.0)
}

/// Returns an id close to `time`. Every message of the shard with this id or a higher one was posted after `time`. None
/// if the shard has no message after `time`.
pub(crate) async fn first_after(db: &mut PgConnection, shard: i16, time: DateTime<Utc>) -> sqlx::Result<Option<i64>> {
    match newest_below(db, Some(shard), i64::MAX).await? {
        Some((_, at)) if at > time + MARGIN => Ok(Some(around(db, Some(shard), time + MARGIN).await?.1)),
        Some(_) | None => Ok(None),
    }
}

/// Returns two ids close to each other, for one shard or for all: messages below the first were posted before `time`,
/// messages at or above the second after it.
pub(crate) async fn around(db: &mut PgConnection, shard: Option<i16>, time: DateTime<Utc>) -> sqlx::Result<(i64, i64)> {
    let (mut low, mut high) = match newest_below(db, shard, i64::MAX).await? {
        Some((newest, _)) => (0, newest + 1),
        None => (0, 0),
    };
    while high - low > IDS_LEFT {
        let middle = low + (high - low) / 2;
        match newest_below(db, shard, middle).await? {
            Some((id, at)) if at > time => high = id,
            Some(_) | None => low = middle,
        }
    }
    Ok((low, high))
}

/// Returns id and time of the newest message below `id`, in one shard or in all.
pub(crate) async fn newest_below(
    db: &mut PgConnection,
    shard: Option<i16>,
    id: i64,
) -> sqlx::Result<Option<(i64, DateTime<Utc>)>> {
    sqlx::query_as(
        "select newest.id, newest.at from pillarbox.shards() as slot (shard) cross join lateral (
             select id, at from pillarbox.log
             where log.shard = slot.shard and id < $1 order by id desc limit 1
         ) newest where $2::smallint is null or slot.shard = $2 order by newest.id desc limit 1",
    )
    .bind(id)
    .bind(shard)
    .fetch_optional(db)
    .await
}
