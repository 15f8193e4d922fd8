//! Replays as operators see them: request, list, cancel. The shard workers read them (`consumers::replay_reader`).

use chrono::{DateTime, Duration, Utc};
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{FromRow, PgConnection, PgExecutor, PgPool, Row};

use crate::log::SHARDS;

/// The time of a snapshot is read before the snapshot is taken, so messages that are posted in between are visible in
/// it but later than its time. A replay up to a snapshot reads this much further: it repeats some messages rather than
/// losing one.
pub(super) const SNAPSHOT_MARGIN: Duration = Duration::minutes(1);

/// What a consumer is to read again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The consumer.
    pub consumer: String,
    /// Messages posted at this time or later.
    pub from: DateTime<Utc>,
    /// Messages posted before this time.
    pub to: DateTime<Utc>,
    /// Repeat messages that have already taken effect.
    pub again: bool,
}

/// Requests a replay. Returns its id, or None if there is no such consumer.
pub async fn request(db: &PgPool, request: &Request) -> sqlx::Result<Option<i64>> {
    let mut tx = db.begin().await?;
    let id = request_in(&mut tx, request).await?;
    tx.commit().await?;
    Ok(id)
}

/// The same in the caller's transaction.
pub async fn request_in(tx: &mut PgConnection, request: &Request) -> sqlx::Result<Option<i64>> {
    let run = if request.again {
        "update pillarbox.cursor set run = run + 1 where consumer = $1 returning run"
    } else {
        "select 0 from pillarbox.cursor where consumer = $1"
    };
    let run: Option<i32> = sqlx::query_scalar(run).bind(&request.consumer).fetch_optional(&mut *tx).await?;
    let Some(run) = run else { return Ok(None) };
    let insert = "with created as (
                      insert into pillarbox.replay (consumer, run, from_at, to_at) values ($1, $2, $3, $4) returning id),
                  shards as (
                      insert into pillarbox.replay_shard (replay, shard) select id, pillarbox.shards() from created)
                  select id from created";
    let id = sqlx::query_scalar(insert)
        .bind(&request.consumer)
        .bind(run)
        .bind(request.from)
        .bind(request.to)
        .fetch_one(tx)
        .await?;
    Ok(Some(id))
}

/// Requests a replay for every consumer; none if the range is empty.
pub(super) async fn request_for_all(tx: &mut PgConnection, from: DateTime<Utc>, to: DateTime<Utc>) -> sqlx::Result<()> {
    sqlx::query(
        "with created as (
             insert into pillarbox.replay (consumer, run, from_at, to_at)
             select consumer, 0, $1, $2 from pillarbox.cursor where $1 < $2 returning id)
         insert into pillarbox.replay_shard (replay, shard) select id, pillarbox.shards() from created",
    )
    .bind(from)
    .bind(to)
    .execute(tx)
    .await
    .map(drop)
}

/// A replay and its progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Replay {
    /// Its number.
    pub id: i64,
    /// The consumer that reads again.
    pub consumer: String,
    /// It reads what was posted at this time or later.
    pub from: DateTime<Utc>,
    /// It reads what was posted before this time.
    pub to: DateTime<Utc>,
    /// It repeats messages that have already taken effect.
    pub again: bool,
    /// When it was requested.
    pub requested_at: DateTime<Utc>,
    /// The number of shards.
    pub shards: i16,
    /// How many shards are done.
    pub shards_done: i64,
    /// When an operator canceled it. Messages that were replayed before are not undone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canceled_at: Option<DateTime<Utc>>,
}

/// The result of canceling a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelResult {
    /// It was canceled now.
    Canceled,
    /// It was done or canceled before; nothing changes.
    AlreadyEnded,
    /// There is no such replay.
    NotFound,
}

impl Replay {
    /// Whether all shards are done.
    pub fn is_done(&self) -> bool {
        self.shards_done >= i64::from(self.shards)
    }
}

const PROGRESS: &str = "
    select replay.*, (select count(*) from pillarbox.replay_shard where replay_shard.replay = replay.id and done) as shards_done
    from pillarbox.replay";

/// Returns the replays of one consumer, or of all, with an id below `before`, newest first.
pub async fn list(
    db: impl PgExecutor<'_>,
    consumer: Option<&str>,
    before: Option<i64>,
    limit: i64,
) -> sqlx::Result<Vec<Replay>> {
    let query = format!(
        "{PROGRESS} where ($1::text is null or consumer = $1) and ($2::bigint is null or id < $2)
         order by id desc limit $3"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(consumer).bind(before).bind(limit).fetch_all(db).await
}

/// Returns a replay; None if there is no such replay.
pub async fn find(db: impl PgExecutor<'_>, id: i64) -> sqlx::Result<Option<Replay>> {
    let query = format!("{PROGRESS} where id = $1");
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).fetch_optional(db).await
}

/// Cancels a replay. The shard workers stop before their next chunk; replayed messages are not undone.
pub async fn cancel(tx: &mut PgConnection, id: i64) -> sqlx::Result<CancelResult> {
    let exists = "select id from pillarbox.replay where id = $1 for update";
    if sqlx::query(exists).bind(id).fetch_optional(&mut *tx).await?.is_none() {
        return Ok(CancelResult::NotFound);
    }
    // The unfinished shards are deleted, so that shard workers and retention do not find them. They are locked in the
    // same order as a shard worker locks them.
    let unfinished = "delete from pillarbox.replay_shard where replay = $1 and shard in
                    (select shard from pillarbox.replay_shard where replay = $1 and not done order by shard for update)";
    if sqlx::query(unfinished).bind(id).execute(&mut *tx).await?.rows_affected() == 0 {
        return Ok(CancelResult::AlreadyEnded);
    }
    let query = "update pillarbox.replay set canceled_at = now() where id = $1";
    sqlx::query(query).bind(id).execute(tx).await?;
    Ok(CancelResult::Canceled)
}

impl FromRow<'_, PgRow> for Replay {
    fn from_row(row: &PgRow) -> sqlx::Result<Replay> {
        Ok(Replay {
            id: row.try_get("id")?,
            consumer: row.try_get("consumer")?,
            from: row.try_get("from_at")?,
            to: row.try_get("to_at")?,
            again: row.try_get::<i32, _>("run")? > 0,
            requested_at: row.try_get("requested_at")?,
            shards: SHARDS,
            shards_done: row.try_get("shards_done")?,
            canceled_at: row.try_get("canceled_at")?,
        })
    }
}
