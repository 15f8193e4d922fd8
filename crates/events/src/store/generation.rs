//! Generations: counters that validate cached pages. A transaction that changes what a cached page shows also
//! increments a counter, so a page with an older generation is a cache miss.

use sqlx::PgConnection;
use uuid::Uuid;

/// The current generations of the feeds and of the cities.
pub(crate) async fn current(db: &mut PgConnection) -> sqlx::Result<(i64, i64)> {
    sqlx::query_as(
        "select coalesce(sum(value) filter (where cache = 'feeds'), 0)::bigint,
                coalesce(sum(value) filter (where cache = 'cities'), 0)::bigint
         from pillarbox_events.generation",
    )
    .fetch_one(db)
    .await
}

/// Invalidates all cached feed pages when this transaction commits.
pub(crate) async fn invalidate_feeds(db: &mut PgConnection, event_id: Uuid) -> sqlx::Result<()> {
    let shard = (event_id.as_u128() % 16) as i16;
    sqlx::query("update pillarbox_events.generation set value = value + 1 where cache = 'feeds' and shard = $1")
        .bind(shard)
        .execute(db)
        .await
        .map(drop)
}

/// Invalidates all cached city suggestions when this transaction commits.
pub(crate) async fn invalidate_cities(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query("update pillarbox_events.generation set value = value + 1 where cache = 'cities'")
        .execute(db)
        .await
        .map(drop)
}
