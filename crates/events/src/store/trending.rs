//! The scores of the trending feed. An epoch is one complete scoring.

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, PgConnection};

/// The table of an epoch. Three tables are reused in turn.
pub(super) fn table_of(epoch: i64) -> String {
    format!("pillarbox_events.trending_{}", epoch.rem_euclid(3))
}

/// The newest epoch; None before the first.
pub(crate) async fn newest_epoch(db: &mut PgConnection) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar("select max(epoch) from pillarbox_events.trending_epoch").fetch_one(db).await
}

/// Whether the epoch is the newest or the one before it. The scores of older epochs are deleted.
pub(crate) async fn exists(db: &mut PgConnection, epoch: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar("select exists (select from pillarbox_events.trending_epoch where epoch = $1)")
        .bind(epoch)
        .fetch_one(db)
        .await
}

/// Acquires the lock for scoring. Returns false if another process holds it.
pub(crate) async fn try_lock(tx: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar("select pg_try_advisory_xact_lock(hashtextextended('pillarbox_events.trending', 0))")
        .fetch_one(tx)
        .await
}

/// The newest epoch and the time of its scoring; None before the first.
pub(crate) async fn newest(db: &mut PgConnection) -> sqlx::Result<Option<(i64, DateTime<Utc>)>> {
    sqlx::query_as("select epoch, scored_at from pillarbox_events.trending_epoch order by epoch desc limit 1")
        .fetch_optional(db)
        .await
}

/// Scores all published events that have not ended, as this epoch, and deletes all epochs but this and the one before
/// it.
pub(crate) async fn score(tx: &mut PgConnection, epoch: i64, now: DateTime<Utc>) -> sqlx::Result<()> {
    let table = table_of(epoch);
    // Scoring a million events takes some seconds and reads the whole table.
    sqlx::query("set local statement_timeout = '120s'").execute(&mut *tx).await?;
    sqlx::query("set local enable_seqscan = on").execute(&mut *tx).await?;
    sqlx::query(AssertSqlSafe(format!("truncate {table}"))).execute(&mut *tx).await?;
    let insert = format!(
        "insert into {table} (rank, start_time, event_id, city_norm, category_norm)
         select -round(1000 * ln(1 + active_participants)
                       + 200 * case when capacity > 0 then least(active_participants::float8 / capacity, 1) else 0 end
                       - 5 * extract(epoch from $1 - published_at)::float8 / 3600)::integer as rank,
                start_time, id, city_norm, category_norm
         from pillarbox_events.event where status = 'published' and end_time > $1
         order by rank, start_time, id"
    );
    sqlx::query(AssertSqlSafe(insert)).bind(now).execute(&mut *tx).await?;
    // The planner needs statistics of the new content.
    sqlx::query(AssertSqlSafe(format!("analyze {table}"))).execute(&mut *tx).await?;
    sqlx::query("insert into pillarbox_events.trending_epoch (epoch, scored_at) values ($1, $2)")
        .bind(epoch)
        .bind(now)
        .execute(&mut *tx)
        .await?;
    sqlx::query("delete from pillarbox_events.trending_epoch where epoch < $1 - 1")
        .bind(epoch)
        .execute(&mut *tx)
        .await
        .map(drop)
}
