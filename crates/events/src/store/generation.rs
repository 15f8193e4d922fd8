//! Generations: numbers that validate cached pages. A transaction that changes what a cached page shows also changes a
//! number, so a page with another generation is a cache miss. The new number is random and not the next one: after a
//! failover that has lost a change, the next change must not produce the generation of the lost one.

use sqlx::PgConnection;
use uuid::Uuid;

#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Generations {
    pub(crate) feeds: i64,
    pub(crate) cities: i64,
}

/// The current generations.
pub(crate) async fn current(db: &mut PgConnection) -> sqlx::Result<Generations> {
    sqlx::query_as(
        "select coalesce(sum(value) filter (where cache = 'feeds'), 0)::bigint as feeds,
                coalesce(sum(value) filter (where cache = 'cities'), 0)::bigint as cities
         from pillarbox_events.generation",
    )
    .fetch_one(db)
    .await
}

/// Invalidates all cached feed pages when this transaction commits.
pub(crate) async fn invalidate_feeds(db: &mut PgConnection, event_id: Uuid) -> sqlx::Result<()> {
    let shard = (event_id.as_u128() % 16) as i16;
    sqlx::query("update pillarbox_events.generation set value = $2 where cache = 'feeds' and shard = $1")
        .bind(shard)
        .bind(random_value())
        .execute(db)
        .await
        .map(drop)
}

/// Invalidates all cached city suggestions when this transaction commits.
pub(crate) async fn invalidate_cities(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query("update pillarbox_events.generation set value = $1 where cache = 'cities'")
        .bind(random_value())
        .execute(db)
        .await
        .map(drop)
}

/// A random number that leaves room for the sum of all rows and for increments.
fn random_value() -> i64 {
    (Uuid::new_v4().as_u128() as i64) & ((1 << 56) - 1)
}
