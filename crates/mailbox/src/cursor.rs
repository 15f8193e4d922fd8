//! Consumers of the log, and how far they have come.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgArguments;
use sqlx::{Acquire, PgConnection, PgExecutor, PgPool, Postgres, Row};
use uuid::Uuid;

use crate::filter::Filter;
use crate::lease;
use crate::log::{Place, SHARDS};
use crate::moment::Moment;
use crate::{parked, replay};

/// Where a new consumer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    Beginning,
    Now,
}

/// What a consumer does with messages: who shows it says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Relay,
    Handler,
}

/// A named reader of the log.
#[derive(Debug, Clone)]
pub struct Cursor {
    pub consumer: String,
    pub kind: Kind,
    pub filter: Filter,
    pub start: Start,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Kind::Relay => "relay",
            Kind::Handler => "handler",
        }
    }
}

impl Cursor {
    /// Makes it known. A consumer that is known keeps its place; what it wants may have changed.
    pub async fn register(&self, db: &PgPool) -> sqlx::Result<()> {
        let mut db = db.acquire().await?;
        let now = Moment::now(&mut db).await?;
        let mut tx = db.begin().await?;
        let insert = "insert into pillarbox.cursor (consumer, kind, wants, leaves) values ($1, $2, $3, $4)
                      on conflict (consumer) do nothing";
        let is_new = sqlx::query(insert)
            .bind(&self.consumer)
            .bind(self.kind.as_str())
            .bind(self.filter.wants())
            .bind(self.filter.leaves())
            .execute(&mut *tx)
            .await?
            .rows_affected()
            == 1;
        if is_new {
            // At the beginning, too: one of this name may have been dropped, and left its places behind.
            let start = match self.start {
                Start::Now => now,
                Start::Beginning => Moment::beginning(&mut tx).await?,
            };
            let places = (0..SHARDS).map(|shard| (shard, Place::behind(start.clone()))).collect();
            append(&mut tx, &self.consumer, &places).await?;
        }
        sqlx::query(
            "update pillarbox.cursor set kind = $2, wants = $3, leaves = $4
             where consumer = $1 and (kind, wants, leaves) is distinct from ($2, $3, $4)",
        )
        .bind(&self.consumer)
        .bind(self.kind.as_str())
        .bind(self.filter.wants())
        .bind(self.filter.leaves())
        .execute(&mut *tx)
        .await?;
        lease::prepare(&mut tx, &self.consumer).await?;
        tx.commit().await
    }
}

/// Lets a consumer go on from now, and with `from` also read again what was posted since. Whoever works for it begins
/// anew. False if there is no such consumer.
pub async fn reset(db: &PgPool, consumer: &str, from: Option<DateTime<Utc>>) -> sqlx::Result<bool> {
    let mut db = db.acquire().await?;
    let now = Moment::now(&mut db).await?;
    let mut tx = db.begin().await?;
    let is_reset = reset_in(&mut tx, consumer, from, &now).await?;
    tx.commit().await?;
    Ok(is_reset)
}

/// The same in the caller's transaction, with a moment from before it.
pub async fn reset_in(
    tx: &mut PgConnection,
    consumer: &str,
    from: Option<DateTime<Utc>>,
    now: &Moment,
) -> sqlx::Result<bool> {
    let query = "update pillarbox.cursor set lapsed_at = null, since = now() where consumer = $1";
    if sqlx::query(query).bind(consumer).execute(&mut *tx).await?.rows_affected() == 0 {
        return Ok(false);
    }
    // An owner whose lane is gone keeps nothing any more.
    sqlx::query("delete from pillarbox.lane where consumer = $1").bind(consumer).execute(&mut *tx).await?;
    let places = (0..SHARDS).map(|shard| (shard, Place::behind(now.clone()))).collect();
    append(tx, consumer, &places).await?;
    if let Some(from) = from {
        let request =
            replay::Request { consumer: consumer.to_owned(), from, to: now.at + replay::MARGIN, again: false };
        replay::request_in(tx, &request).await?;
    }
    Ok(true)
}

/// What became of a wish to drop a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    Yes,
    Unknown,
    /// Somebody works for it: it would be back at once.
    InUse,
}

/// Forgets a consumer. What it had parked is set aside as dead letters. Its places, of which there may be millions, go with
/// their days; until then nobody asks for them.
pub async fn forget(db: &PgPool, consumer: &str) -> sqlx::Result<Dropped> {
    let mut tx = db.begin().await?;
    let dropped = forget_in(&mut tx, consumer).await?;
    tx.commit().await?;
    Ok(dropped)
}

/// The same in the caller's transaction.
pub async fn forget_in(tx: &mut PgConnection, consumer: &str) -> sqlx::Result<Dropped> {
    let in_use: bool = sqlx::query_scalar(
        "select exists (select from pillarbox.lane join pillarbox.replica on replica.id = lane.replica
                        where lane.consumer = $1 and replica.until > now())",
    )
    .bind(consumer)
    .fetch_one(&mut *tx)
    .await?;
    if in_use {
        return Ok(Dropped::InUse);
    }
    let gone = sqlx::query("delete from pillarbox.cursor where consumer = $1").bind(consumer).execute(&mut *tx).await?;
    if gone.rows_affected() == 0 {
        return Ok(Dropped::Unknown);
    }
    for statement in [
        "delete from pillarbox.lane where consumer = $1",
        "delete from pillarbox.lease where consumer = $1",
        "delete from pillarbox.discarded where consumer = $1",
        "with gone as (delete from pillarbox.replay where consumer = $1 returning id)
         delete from pillarbox.replay_shard using gone where replay = gone.id",
    ] {
        sqlx::query(statement).bind(consumer).execute(&mut *tx).await?;
    }
    parked::set_aside(tx, Some(consumer), "its consumer was dropped").await?;
    Ok(Dropped::Yes)
}

/// Whether it has been behind for too long to go on by itself; None if there is no such consumer.
pub(crate) async fn is_lapsed(db: &mut PgConnection, consumer: &str) -> sqlx::Result<Option<bool>> {
    let query = "select lapsed_at is not null from pillarbox.cursor where consumer = $1";
    sqlx::query_scalar(query).bind(consumer).fetch_optional(db).await
}

/// The newest places of these shards; a shard without one is at the beginning.
pub(crate) async fn places(
    db: &mut PgConnection,
    consumer: &str,
    shards: &[i16],
) -> sqlx::Result<BTreeMap<i16, Place>> {
    let rows = sqlx::query(
        "select shard, old_id, old::text as old, old_at, new_id, new::text as new, new_at, last_id
         from unnest($2::smallint[]) as shard cross join lateral pillarbox.place($1, shard)",
    )
    .bind(consumer)
    .bind(shards)
    .fetch_all(&mut *db)
    .await?;
    let beginning = Moment::beginning(db).await?;
    let mut places: BTreeMap<i16, Place> =
        shards.iter().map(|shard| (*shard, Place::behind(beginning.clone()))).collect();
    for row in rows {
        let old =
            Moment { id_before: row.try_get("old_id")?, snapshot: row.try_get("old")?, at: row.try_get("old_at")? };
        let new =
            Moment { id_before: row.try_get("new_id")?, snapshot: row.try_get("new")?, at: row.try_get("new_at")? };
        places.insert(row.try_get("shard")?, Place { old, new, last_id: row.try_get("last_id")? });
    }
    Ok(places)
}

/// Writes down new places: a row for each window, which most often is one row for all.
pub(crate) async fn append(db: &mut PgConnection, consumer: &str, places: &BTreeMap<i16, Place>) -> sqlx::Result<()> {
    for ((old, new), (shards, last_ids)) in windows(places) {
        let query =
            "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
                     values ($1, $2, $3, $4::pg_snapshot, $5, $6, $7::pg_snapshot, $8, $9)";
        bind(sqlx::query(query).bind(consumer), old, new, shards, last_ids).execute(&mut *db).await?;
    }
    Ok(())
}

/// The same for one window, and for who is still in the share-out: in one statement. What says only where a reader is need
/// not be kept `durably`. False if others have taken over; None if the places are of several windows.
pub(crate) async fn advance(
    db: impl PgExecutor<'_>,
    consumer: &str,
    owner: Uuid,
    places: &BTreeMap<i16, Place>,
    durably: bool,
) -> sqlx::Result<Option<bool>> {
    let mut windows = windows(places).into_iter();
    let (Some(((old, new), (shards, last_ids))), None) = (windows.next(), windows.next()) else { return Ok(None) };
    let query = "with held as (
                     select case when not $11 then set_config('synchronous_commit', 'off', true) end from pillarbox.lane
                     where consumer = $1 and owner = $10 for key share)
                 insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
                 select $1, $2, $3, $4::pg_snapshot, $5, $6, $7::pg_snapshot, $8, $9 from held";
    let query = bind(sqlx::query(query).bind(consumer), old, new, shards, last_ids).bind(owner).bind(durably);
    Ok(Some(query.execute(db).await?.rows_affected() == 1))
}

/// Of a window: from when to when, and its shards with how far each has been read.
type Window<'a> = (Between<'a>, (Vec<i16>, Vec<i64>));
type Between<'a> = (&'a Moment, &'a Moment);

fn windows(places: &BTreeMap<i16, Place>) -> Vec<Window<'_>> {
    let mut windows = BTreeMap::<Between<'_>, (Vec<i16>, Vec<i64>)>::new();
    for (shard, place) in places {
        let (shards, last_ids) = windows.entry((&place.old, &place.new)).or_default();
        shards.push(*shard);
        last_ids.push(place.last_id);
    }
    windows.into_iter().collect()
}

type Query<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

fn bind<'q>(query: Query<'q>, old: &'q Moment, new: &'q Moment, shards: Vec<i16>, last_ids: Vec<i64>) -> Query<'q> {
    let query = query.bind(shards).bind(last_ids);
    let query = query.bind(&old.snapshot).bind(old.id_before).bind(old.at);
    query.bind(&new.snapshot).bind(new.id_before).bind(new.at)
}
