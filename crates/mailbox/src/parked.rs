//! Messages that a consumer could not take, and what waits behind them. Only a shard's owner runs them.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgExecutor, Row};
use uuid::Uuid;

use crate::log::{self, Message};
use crate::post::AggregateId;

/// What parked messages and dead letters have in common: the whole message.
pub(crate) const CONTENT: &str = "log_id, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, \
                                  payload, at";

/// A tenant's key.
pub(crate) type Key = (String, String);

pub(crate) fn key_of(message: &Message) -> Option<Key> {
    message.key.as_ref().map(|key| (message.tenant.clone(), key.clone()))
}

/// To be parked.
pub(crate) struct Parking<'a> {
    pub(crate) message: &'a Message,
    pub(crate) run: i32,
    pub(crate) attempts: i32,
    /// None: it waits behind an earlier one of its key.
    pub(crate) next_at: Option<DateTime<Utc>>,
    pub(crate) last_error: Option<&'a str>,
}

/// Is parked.
#[derive(Debug)]
pub(crate) struct Parked {
    pub(crate) place: i64,
    pub(crate) run: i32,
    pub(crate) attempts: i32,
    pub(crate) discarded: bool,
    pub(crate) message: Message,
}

/// Is parked, for people.
#[derive(Debug)]
pub struct ParkedMessage {
    pub place: i64,
    pub consumer: String,
    pub attempts: i32,
    /// None: it waits behind an earlier one of its key.
    pub next_at: Option<DateTime<Utc>>,
    pub last_error: Option<String>,
    pub parked_at: DateTime<Utc>,
    /// Somebody has thrown it away, and its owner has not yet passed it.
    pub discarded: bool,
    pub message: Message,
}

/// What became of a wish to try a parked message at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retried {
    Yes,
    Unknown,
    /// An earlier one of its key, at this place, is to be tried first.
    Behind(i64),
}

/// In the order of parking, behind `after`; of one consumer, or of all.
pub async fn list(
    db: impl PgExecutor<'_>,
    consumer: Option<&str>,
    after: Option<i64>,
    limit: i64,
) -> sqlx::Result<Vec<ParkedMessage>> {
    let query = "select *, log_id as id from pillarbox.parked
                 where ($1::text is null or consumer = $1) and place > $2 order by place limit $3";
    let rows = sqlx::query(query).bind(consumer).bind(after.unwrap_or(0)).bind(limit).fetch_all(db).await?;
    let parked = |row| -> sqlx::Result<ParkedMessage> {
        Ok(ParkedMessage {
            place: Row::try_get(row, "place")?,
            consumer: Row::try_get(row, "consumer")?,
            attempts: Row::try_get(row, "attempts")?,
            next_at: Row::try_get(row, "next_at")?,
            last_error: Row::try_get(row, "last_error")?,
            parked_at: Row::try_get(row, "parked_at")?,
            discarded: Row::try_get(row, "discarded")?,
            message: log::message(row)?,
        })
    };
    rows.iter().map(parked).collect()
}

/// Makes it due now; its owner runs it within seconds.
pub async fn retry(tx: &mut PgConnection, place: i64) -> sqlx::Result<Retried> {
    let query = format!("select ({FIRST_OF_ITS_KEY}) from pillarbox.parked where place = $1 for update");
    let first: Option<Option<i64>> =
        sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(place).fetch_optional(&mut *tx).await?;
    match first {
        None => Ok(Retried::Unknown),
        Some(Some(earlier)) => Ok(Retried::Behind(earlier)),
        Some(None) => {
            let query = "update pillarbox.parked set next_at = now() where place = $1";
            sqlx::query(query).bind(place).execute(tx).await?;
            Ok(Retried::Yes)
        }
    }
}

/// Throws it away: its owner passes it, now or when its turn comes. False if there is none.
pub async fn discard(db: impl PgExecutor<'_>, place: i64) -> sqlx::Result<bool> {
    // One that waits behind another stays where it is: what follows it must not overtake what is before it.
    let query = format!(
        "with gone as (
             update pillarbox.parked set discarded = true,
                 next_at = case when ({FIRST_OF_ITS_KEY}) is null then now() else next_at end
             where place = $1 returning consumer, message_id, run, log_id, attempts, last_error
         ), noted as ({NOTE_DISCARDED})
         select count(*) from gone"
    );
    Ok(sqlx::query_scalar::<_, i64>(sqlx::AssertSqlSafe(query)).bind(place).fetch_one(db).await? > 0)
}

/// Of what is `gone`: that it was thrown away, and not done. What a replay repeated was done before, and what never was in the
/// log has no status.
pub(crate) const NOTE_DISCARDED: &str = "
    insert into pillarbox.discarded (consumer, message_id, attempts, last_error)
    select distinct on (consumer, message_id) consumer, message_id, attempts, last_error from gone
    where run = 0 and log_id > 0
    on conflict (consumer, message_id) do update
        set attempts = excluded.attempts, last_error = excluded.last_error, discarded_at = excluded.discarded_at";

/// The first of a parked row's key, if it is not that row itself.
const FIRST_OF_ITS_KEY: &str = "
    select min(earlier.place) from pillarbox.parked as earlier
    where earlier.consumer = parked.consumer and earlier.tenant = parked.tenant and earlier.key = parked.key
      and earlier.place < parked.place";

/// Parks these, in this order.
pub(crate) async fn park(tx: &mut PgConnection, consumer: &str, parking: &[Parking<'_>]) -> sqlx::Result<()> {
    if parking.is_empty() {
        return Ok(());
    }
    let text = |of: fn(&Message) -> Option<&str>| parking.iter().map(|one| of(one.message)).collect::<Vec<_>>();
    sqlx::query(
        "insert into pillarbox.parked (consumer, shard, run, attempts, next_at, last_error, log_id, message_id, source,
             tenant, topic, key, aggregate_type, aggregate_id, headers, payload, at)
         select $1, shard, run, attempts, next_at, last_error, log_id, message_id, source, tenant, topic, key,
             aggregate_type, aggregate_id::json, headers::jsonb, payload::json, at
         from unnest($2::smallint[], $3::integer[], $4::integer[], $5::timestamptz[], $6::text[], $7::bigint[],
             $8::uuid[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[],
             $16::text[], $17::timestamptz[]) with ordinality
             as new (shard, run, attempts, next_at, last_error, log_id, message_id, source, tenant, topic, key,
                     aggregate_type, aggregate_id, headers, payload, at, place)
         order by new.place
         on conflict (consumer, message_id, run) do nothing",
    )
    .bind(consumer)
    .bind(parking.iter().map(|one| one.message.shard).collect::<Vec<_>>())
    .bind(parking.iter().map(|one| one.run).collect::<Vec<_>>())
    .bind(parking.iter().map(|one| one.attempts).collect::<Vec<_>>())
    .bind(parking.iter().map(|one| one.next_at).collect::<Vec<_>>())
    .bind(parking.iter().map(|one| one.last_error).collect::<Vec<_>>())
    .bind(parking.iter().map(|one| one.message.id).collect::<Vec<_>>())
    .bind(parking.iter().map(|one| one.message.message_id).collect::<Vec<_>>())
    .bind(text(|message| Some(&message.source)))
    .bind(text(|message| Some(&message.tenant)))
    .bind(text(|message| Some(&message.topic)))
    .bind(text(|message| message.key.as_deref()))
    .bind(text(|message| message.aggregate_type.as_deref()))
    .bind(parking.iter().map(|one| one.message.aggregate_id.as_ref().map(AggregateId::to_json)).collect::<Vec<_>>())
    .bind(text(|message| Some(message.headers.get())))
    .bind(text(|message| Some(message.payload.get())))
    .bind(parking.iter().map(|one| one.message.at).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

/// The keys of these shards that have something parked: what follows must wait.
pub(crate) async fn keys(db: &mut PgConnection, consumer: &str, shards: &[i16]) -> sqlx::Result<Vec<(i16, Key)>> {
    let rows = sqlx::query(
        "select distinct shard, tenant, key from pillarbox.parked
         where consumer = $1 and shard = any($2::smallint[]) and key is not null",
    )
    .bind(consumer)
    .bind(shards)
    .fetch_all(db)
    .await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, (row.try_get(1)?, row.try_get(2)?)))).collect()
}

/// Which of these keys still have something parked.
pub(crate) async fn still_parked(
    db: &mut PgConnection,
    consumer: &str,
    keys: &HashSet<Key>,
) -> sqlx::Result<HashSet<Key>> {
    let (tenants, keys): (Vec<&str>, Vec<&str>) = keys.iter().map(|(t, k)| (t.as_str(), k.as_str())).unzip();
    let found: Vec<Key> = sqlx::query_as(
        "select tenant, key from unnest($2::text[], $3::text[]) as asked (tenant, key)
         where exists (select from pillarbox.parked
                       where parked.consumer = $1 and parked.tenant = asked.tenant and parked.key = asked.key)",
    )
    .bind(consumer)
    .bind(tenants)
    .bind(keys)
    .fetch_all(db)
    .await?;
    Ok(found.into_iter().collect())
}

/// What is due, each with some of what waits behind it, so that a long tail does not go one by one.
pub(crate) async fn due(
    db: &mut PgConnection,
    consumer: &str,
    shards: &[i16],
    now: DateTime<Utc>,
    limit: u32,
) -> sqlx::Result<Vec<Parked>> {
    // A dead letter that is tried again is due, and may stand behind others of its key: nothing follows it then, or it
    // would overtake them.
    let rows = sqlx::query(
        "with head as (
             select * from pillarbox.parked
             where consumer = $1 and shard = any($2::smallint[]) and next_at <= $3 order by next_at limit $4
         ), behind as (
             select follower.* from head cross join lateral (
                 select * from pillarbox.parked
                 where consumer = $1 and tenant = head.tenant and key = head.key and place > head.place
                   and next_at is null
                   and not exists (select from pillarbox.parked as earlier
                                   where consumer = $1 and tenant = head.tenant and key = head.key
                                     and place < head.place)
                 order by place limit greatest(1, $4 / (select count(*) from head))
             ) follower
         )
         select *, log_id as id from head union all select *, log_id as id from behind order by place",
    )
    .bind(consumer)
    .bind(shards)
    .bind(now)
    .bind(i64::from(limit))
    .fetch_all(db)
    .await?;
    let parked = |row| -> sqlx::Result<Parked> {
        Ok(Parked {
            place: Row::try_get(row, "place")?,
            run: Row::try_get(row, "run")?,
            attempts: Row::try_get(row, "attempts")?,
            discarded: Row::try_get(row, "discarded")?,
            message: log::message(row)?,
        })
    };
    rows.iter().map(parked).collect()
}

/// When the next is due.
pub(crate) async fn next_due(
    db: &mut PgConnection,
    consumer: &str,
    shards: &[i16],
) -> sqlx::Result<Option<DateTime<Utc>>> {
    sqlx::query_scalar(
        "select min(next_at) from pillarbox.parked
         where consumer = $1 and shard = any($2::smallint[]) and next_at is not null",
    )
    .bind(consumer)
    .bind(shards)
    .fetch_one(db)
    .await
}

/// It failed again, and will be tried again.
pub(crate) async fn put_off(
    tx: &mut PgConnection,
    place: i64,
    attempts: i32,
    next_at: DateTime<Utc>,
    error: &str,
) -> sqlx::Result<()> {
    let query = "update pillarbox.parked set attempts = $2, next_at = $3, last_error = $4 where place = $1";
    sqlx::query(query).bind(place).bind(attempts).bind(next_at).bind(error).execute(tx).await.map(drop)
}

/// These are done, and those were thrown away.
pub(crate) async fn finish(tx: &mut PgConnection, done: &[i64], discarded: &[i64]) -> sqlx::Result<()> {
    let query = "delete from pillarbox.parked where place = any($1)";
    sqlx::query(query).bind(discarded).execute(&mut *tx).await?;
    let query = "delete from pillarbox.parked where place = any($1) returning discarded, consumer, message_id";
    let done: Vec<(bool, String, Uuid)> = sqlx::query_as(query).bind(done).fetch_all(&mut *tx).await?;
    // Thrown away while it was at work: it is done after all.
    for (_, consumer, message_id) in done.into_iter().filter(|(discarded, ..)| *discarded) {
        let query = "delete from pillarbox.discarded where consumer = $1 and message_id = $2";
        sqlx::query(query).bind(consumer).bind(message_id).execute(&mut *tx).await?;
    }
    Ok(())
}

/// It is given up.
pub(crate) async fn bury(tx: &mut PgConnection, place: i64, attempts: i32, error: &str) -> sqlx::Result<()> {
    let query = format!(
        "with given_up as (delete from pillarbox.parked where place = $1 returning *)
         insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, {CONTENT})
         select consumer, shard, run, $2, $3, {CONTENT} from given_up"
    );
    let query = sqlx::query(sqlx::AssertSqlSafe(query)).bind(place).bind(attempts).bind(error);
    query.execute(tx).await.map(drop)
}

/// The first of each of these keys is due now, if none is already.
pub(crate) async fn promote(
    tx: &mut PgConnection,
    consumer: &str,
    keys: &HashSet<Key>,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let (tenants, keys): (Vec<&str>, Vec<&str>) = keys.iter().map(|(t, k)| (t.as_str(), k.as_str())).unzip();
    sqlx::query(
        "update pillarbox.parked set next_at = $4
         from unnest($2::text[], $3::text[]) as freed (tenant, key)
         cross join lateral (
             select place from pillarbox.parked
             where consumer = $1 and tenant = freed.tenant and key = freed.key order by place limit 1
         ) as head
         where parked.place = head.place and parked.next_at is null",
    )
    .bind(consumer)
    .bind(tenants)
    .bind(keys)
    .bind(now)
    .execute(tx)
    .await
    .map(drop)
}

/// Makes dead letters of all that one consumer, or every consumer, has parked.
pub(crate) async fn set_aside(tx: &mut PgConnection, consumer: Option<&str>, reason: &str) -> sqlx::Result<()> {
    let query = format!(
        "with aside as (delete from pillarbox.parked where $1::text is null or consumer = $1 returning *)
         insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, {CONTENT})
         select consumer, shard, run, attempts, $2, {CONTENT} from aside order by place"
    );
    sqlx::query(sqlx::AssertSqlSafe(query)).bind(consumer).bind(reason).execute(tx).await.map(drop)
}
