//! Reading a time range again, for one consumer.
//!
//! A replay of run 0 repairs: what has an inbox row is left alone. One of a new run repeats. The shard's owner reads it
//! between its live batches, so a key is never worked on in two places. It covers what the consumer has already passed; the
//! rest comes to it anyway. Where the range begins and ends in the log is found by halving ([`crate::browse`]), so ten
//! minutes cost ten minutes of the log, however long its day is.

use chrono::{DateTime, Duration, Utc};
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgExecutor, PgPool, Row};
use utoipa::ToSchema;

use crate::browse;
use crate::filter::Filter;
use crate::log::{self, Message, Place, SHARDS};

/// A moment's time is read before its snapshot is taken: what was posted in between is visible in it, and later than it.
/// Who replays up to a moment reads this much further, and repeats some rather than losing one.
pub(crate) const MARGIN: Duration = Duration::minutes(1);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub consumer: String,
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
    /// Repeat what has taken effect already.
    pub again: bool,
}

/// One shard of a replay.
#[derive(Debug, Clone)]
pub(crate) struct Replaying {
    pub(crate) replay: i64,
    pub(crate) run: i32,
    pub(crate) shard: i16,
    pub(crate) from: DateTime<Utc>,
    pub(crate) to: DateTime<Utc>,
    /// 0: it has not begun.
    pub(crate) last_id: i64,
    /// Nothing of the range is here or above. None: not found yet, or the log does not go on behind the range.
    pub(crate) until_id: Option<i64>,
    pub(crate) done: bool,
}

/// Asks for a replay; returns its id, or None if there is no such consumer.
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
    let insert = "with made as (
                      insert into pillarbox.replay (consumer, run, from_at, to_at) values ($1, $2, $3, $4) returning id),
                  shards as (
                      insert into pillarbox.replay_shard (replay, shard) select id, pillarbox.shards() from made)
                  select id from made";
    let id = sqlx::query_scalar(insert)
        .bind(&request.consumer)
        .bind(run)
        .bind(request.from)
        .bind(request.to)
        .fetch_one(tx)
        .await?;
    Ok(Some(id))
}

/// A replay that was asked for, and how far it has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Replay {
    pub id: i64,
    #[schema(example = "relay.default")]
    pub consumer: String,
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
    /// It repeats what has taken effect already.
    pub again: bool,
    pub requested_at: DateTime<Utc>,
    #[schema(example = 16)]
    pub shards: i16,
    pub shards_done: i64,
    /// An operator has called it off; what it had repeated by then stays repeated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canceled_at: Option<DateTime<Utc>>,
}

/// What became of a wish to call a replay off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Canceled {
    Yes,
    /// It was done, or called off before: nothing changes.
    HadEnded,
    Unknown,
}

impl Replay {
    pub fn is_done(&self) -> bool {
        self.shards_done >= i64::from(self.shards)
    }
}

const PROGRESS: &str = "
    select replay.*, (select count(*) from pillarbox.replay_shard where replay_shard.replay = replay.id and done) as shards_done
    from pillarbox.replay";

/// Newest first, below `before`; of one consumer, or of all.
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
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).bind(consumer).bind(before).bind(limit).fetch_all(db).await?;
    rows.iter().map(replay).collect()
}

pub async fn find(db: impl PgExecutor<'_>, id: i64) -> sqlx::Result<Option<Replay>> {
    let query = format!("{PROGRESS} where id = $1");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).fetch_optional(db).await?;
    row.as_ref().map(replay).transpose()
}

/// Calls it off. Its lanes stop before their next chunk; what they have repeated stays repeated.
pub async fn cancel(tx: &mut PgConnection, id: i64) -> sqlx::Result<Canceled> {
    let known = "select id from pillarbox.replay where id = $1 for update";
    if sqlx::query(known).bind(id).fetch_optional(&mut *tx).await?.is_none() {
        return Ok(Canceled::Unknown);
    }
    // Gone, not marked: whoever asks for what is unfinished, a lane or retention, finds nothing. In the order in which a
    // lane locks them.
    let left = "delete from pillarbox.replay_shard where replay = $1 and shard in
                    (select shard from pillarbox.replay_shard where replay = $1 and not done order by shard for update)";
    if sqlx::query(left).bind(id).execute(&mut *tx).await?.rows_affected() == 0 {
        return Ok(Canceled::HadEnded);
    }
    let query = "update pillarbox.replay set canceled_at = now() where id = $1";
    sqlx::query(query).bind(id).execute(tx).await?;
    Ok(Canceled::Yes)
}

fn replay(row: &PgRow) -> sqlx::Result<Replay> {
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

/// What is left to be replayed of these shards.
pub(crate) async fn unfinished(db: &mut PgConnection, consumer: &str, shards: &[i16]) -> sqlx::Result<Vec<Replaying>> {
    let rows = sqlx::query(
        "select replay.id, run, shard, from_at, to_at, last_id, until_id
         from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
         where consumer = $1 and shard = any($2) and not done order by replay.id, shard",
    )
    .bind(consumer)
    .bind(shards)
    .fetch_all(db)
    .await?;
    let replaying = |row| -> sqlx::Result<Replaying> {
        Ok(Replaying {
            replay: Row::try_get(row, "id")?,
            run: Row::try_get(row, "run")?,
            shard: Row::try_get(row, "shard")?,
            from: Row::try_get(row, "from_at")?,
            to: Row::try_get(row, "to_at")?,
            last_id: Row::try_get(row, "last_id")?,
            until_id: Row::try_get(row, "until_id")?,
            done: false,
        })
    };
    rows.iter().map(replaying).collect()
}

/// Reads the next messages and moves behind them.
pub(crate) async fn read(
    db: &mut PgConnection,
    replaying: &mut Replaying,
    filter: &Filter,
    place: &Place,
    limit: u32,
) -> sqlx::Result<Vec<Message>> {
    if replaying.last_id == 0 {
        replaying.last_id = (browse::first_since(db, replaying.shard, replaying.from).await? - 1).max(0);
    }
    if replaying.until_id.is_none() {
        replaying.until_id = browse::first_after(db, replaying.shard, replaying.to).await?;
    }
    let rows = sqlx::query(
        "select *, pillarbox.subject(source, topic, aggregate_type) ~ $6
                   and ($7::text is null or pillarbox.subject(source, topic, aggregate_type) !~ $7) as wanted
         from pillarbox.log
         where shard = $1 and id > $2 and id < $11 and at >= $3 and at < $4
           and exists (select from pillarbox.replay_shard as asked where asked.replay = $12 and asked.shard = $1)
           and (id <= (select floor_id from pillarbox.home) or pg_visible_in_snapshot(xid, $5::text::pg_snapshot)
                or (id <= $9 and pg_visible_in_snapshot(xid, $10::text::pg_snapshot)))
         order by id limit $8",
    )
    .bind(replaying.shard)
    .bind(replaying.last_id)
    .bind(replaying.from)
    .bind(replaying.to)
    .bind(&place.old.snapshot)
    .bind(filter.wants())
    .bind(filter.leaves())
    .bind(i64::from(limit))
    // Of a window that is still open, what has been read is passed as well.
    .bind(place.last_id)
    .bind(&place.new.snapshot)
    .bind(replaying.until_id.unwrap_or(i64::MAX))
    // Not asked for any more when it was called off.
    .bind(replaying.replay)
    .fetch_all(db)
    .await?;
    let mut messages = Vec::new();
    for row in &rows {
        replaying.last_id = row.try_get("id")?;
        if row.try_get("wanted")? {
            messages.push(log::message(row)?);
        }
    }
    replaying.done = rows.len() < limit as usize;
    Ok(messages)
}

pub(crate) async fn advance(tx: &mut PgConnection, replaying: &Replaying) -> sqlx::Result<()> {
    let query =
        "update pillarbox.replay_shard set last_id = $3, until_id = $4, done = $5 where replay = $1 and shard = $2";
    sqlx::query(query)
        .bind(replaying.replay)
        .bind(replaying.shard)
        .bind(replaying.last_id)
        .bind(replaying.until_id)
        .bind(replaying.done)
        .execute(tx)
        .await
        .map(drop)
}
