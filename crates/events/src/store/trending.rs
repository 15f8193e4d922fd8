//! The scores of the trending feed. An epoch is one complete scoring.

use chrono::{DateTime, Utc};
use pillarbox::database::try_work_lock;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

// The score of an event is the sum of three terms.
/// Multiplied by `ln(1 + participants)`.
const PARTICIPANTS_WEIGHT: i32 = 1_000;
/// Multiplied by the occupied part of the capacity, from 0 to 1; 0 if the capacity is unlimited.
const OCCUPANCY_WEIGHT: i32 = 200;
/// Multiplied by the hours since the first publication, and subtracted.
const AGE_WEIGHT: i32 = 5;

/// The table of an epoch. The epochs rotate over three tables.
pub(super) fn table_of(epoch: i64) -> String {
    format!("pillarbox_events.trending_{}", epoch.rem_euclid(3))
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
    try_work_lock(tx, "events.trending").await
}

/// When events were last added to an epoch; None if that has not happened.
pub(crate) async fn extended_at(db: &mut PgConnection, epoch: i64) -> sqlx::Result<Option<DateTime<Utc>>> {
    let query = "select extended_at from pillarbox_events.trending_epoch where epoch = $1";
    sqlx::query_scalar(query).bind(epoch).fetch_one(db).await
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
    let insert = format!("{} order by rank, start_time, id", insert_scores(epoch));
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

/// The events that were published after this time.
pub(crate) async fn published_since(db: &mut PgConnection, since: DateTime<Utc>) -> sqlx::Result<Vec<Uuid>> {
    let query =
        "select distinct event_id from pillarbox_events.status_change where at > $1 and to_status = 'published'";
    sqlx::query_scalar(query).bind(since).fetch_all(db).await
}

/// Adds those of the events to an epoch that are published, have not ended and have no score in it. The scores of other
/// events stay, so a list that a client reads page by page stays the same, except for the new events.
pub(crate) async fn extend(tx: &mut PgConnection, epoch: i64, events: &[Uuid], now: DateTime<Utc>) -> sqlx::Result<()> {
    // No index leads from an event to its score: scoring would have to fill it for every event, and this scan is rare.
    sqlx::query("set local enable_seqscan = on").execute(&mut *tx).await?;
    let scored = format!("select event_id from {} where event_id = any($1)", table_of(epoch));
    let scored: Vec<Uuid> = sqlx::query_scalar(AssertSqlSafe(scored)).bind(events).fetch_all(&mut *tx).await?;
    let new: Vec<Uuid> = events.iter().filter(|id| !scored.contains(id)).copied().collect();
    let insert = format!("{} and id = any($2)", insert_scores(epoch));
    sqlx::query(AssertSqlSafe(insert)).bind(now).bind(new).execute(tx).await.map(drop)
}

pub(crate) async fn set_extended(db: &mut PgConnection, epoch: i64, at: DateTime<Utc>) -> sqlx::Result<()> {
    let update = "update pillarbox_events.trending_epoch set extended_at = $2 where epoch = $1";
    sqlx::query(update).bind(epoch).bind(at).execute(db).await.map(drop)
}

/// Inserts the scores of published events that have not ended at `$1`.
fn insert_scores(epoch: i64) -> String {
    format!(
        "insert into {} (rank, start_time, event_id, city_norm, category_norm)
         select -round({PARTICIPANTS_WEIGHT} * ln(1 + active_participants)
                       + {OCCUPANCY_WEIGHT}
                         * case when capacity > 0 then least(active_participants::float8 / capacity, 1) else 0 end
                       - {AGE_WEIGHT} * extract(epoch from $1 - published_at)::float8 / 3600)::integer as rank,
                start_time, id, city_norm, category_norm
         from pillarbox_events.event where status = 'published' and end_time > $1",
        table_of(epoch)
    )
}
