use chrono::{DateTime, Utc};
use sqlx::{Acquire, PgConnection};

/// Three tables take turns.
pub(super) fn table_of(epoch: i64) -> String {
    format!("pillarbox_events.trending_{}", epoch.rem_euclid(3))
}

/// The newest epoch; None before the first.
pub(crate) async fn newest(db: &mut PgConnection) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar("select max(epoch) from pillarbox_events.trending_epoch").fetch_one(db).await
}

/// Whether it is the newest epoch, or the one before.
pub(crate) async fn is_kept(db: &mut PgConnection, epoch: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar("select exists (select from pillarbox_events.trending_epoch where epoch = $1)")
        .bind(epoch)
        .fetch_one(db)
        .await
}

/// Scores all that is published and not over, unless another process does or the newest epoch is not older than this.
pub(crate) async fn take(
    db: &mut PgConnection,
    older_than: DateTime<Utc>,
    now: DateTime<Utc>,
) -> sqlx::Result<Option<i64>> {
    let mut tx = db.begin().await?;
    let is_mine: bool =
        sqlx::query_scalar("select pg_try_advisory_xact_lock(hashtextextended('pillarbox_events.trending', 0))")
            .fetch_one(&mut *tx)
            .await?;
    let newest: Option<(i64, DateTime<Utc>)> =
        sqlx::query_as("select epoch, taken_at from pillarbox_events.trending_epoch order by epoch desc limit 1")
            .fetch_optional(&mut *tx)
            .await?;
    if !is_mine || newest.is_some_and(|(_, taken_at)| taken_at > older_than) {
        return Ok(None);
    }
    let epoch = newest.map_or(1, |(epoch, _)| epoch + 1);
    let table = table_of(epoch);
    // A million events take some seconds, and are read as a whole.
    sqlx::query("set local statement_timeout = '120s'").execute(&mut *tx).await?;
    sqlx::query("set local enable_seqscan = on").execute(&mut *tx).await?;
    let forget = format!("truncate {table}");
    sqlx::query(sqlx::AssertSqlSafe(forget)).execute(&mut *tx).await?;
    let score = format!(
        "insert into {table} (rank, start_time, event_id, city_norm, category_norm)
         select -round(1000 * ln(1 + active_participants)
                       + 200 * case when capacity > 0 then least(active_participants::float8 / capacity, 1) else 0 end
                       - 5 * extract(epoch from $1 - published_at)::float8 / 3600)::integer as rank,
                start_time, id, city_norm, category_norm
         from pillarbox_events.event where status = 'published' and end_time > $1
         order by rank, start_time, id"
    );
    sqlx::query(sqlx::AssertSqlSafe(score)).bind(now).execute(&mut *tx).await?;
    // It is new to the planner.
    sqlx::query(sqlx::AssertSqlSafe(format!("analyze {table}"))).execute(&mut *tx).await?;
    sqlx::query("insert into pillarbox_events.trending_epoch (epoch, taken_at) values ($1, $2)")
        .bind(epoch)
        .bind(now)
        .execute(&mut *tx)
        .await?;
    sqlx::query("delete from pillarbox_events.trending_epoch where epoch < $1 - 1")
        .bind(epoch)
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(Some(epoch))
}
