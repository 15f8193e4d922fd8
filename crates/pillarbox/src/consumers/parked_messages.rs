//! Storage of parked messages: failed messages that wait for their retry, and later messages of the same key, which wait
//! for the failed ones. Only the owner of a shard processes the parked messages of the shard.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::{Connection, PgConnection, Postgres, Row, Transaction};
use uuid::Uuid;

use super::processor::{Delivery, Origin};
use crate::database::{is_data_error, redacted_error};
use crate::log::{AggregateId, Message};

/// The columns that parked messages and dead letters have in common: the whole message.
pub(crate) const CONTENT: &str = "log_id, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, \
                                  payload, at";

/// The error of a message that cannot be parked, because another one with the same id is.
const ID_IN_USE: &str = "another message with the same id is parked: retry this one when that one is done";

/// A tenant and a key, as [`Message::ordering_key`] returns them.
pub(super) type Key = (String, String);

/// A message to be parked.
pub(super) struct NewParked<'a> {
    pub(super) message: &'a Message,
    pub(super) run: i32,
    pub(super) attempts: i32,
    /// None: it waits for an earlier message of its key.
    pub(super) next_at: Option<DateTime<Utc>>,
    pub(super) last_error: Option<&'a str>,
}

/// A message that cannot be parked, and why.
pub(super) struct NotParked<'n> {
    pub(super) new: &'n NewParked<'n>,
    pub(super) reason: String,
}

/// Parks the messages, in this order, unless they are parked already. Returns those that cannot be parked.
pub(super) async fn insert<'n>(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    new: &'n [NewParked<'n>],
) -> sqlx::Result<Vec<NotParked<'n>>> {
    if new.is_empty() {
        return Ok(Vec::new());
    }
    let mut attempt = tx.begin().await?;
    match insert_all(&mut attempt, consumer, new).await {
        Ok(not_parked) => {
            attempt.commit().await?;
            return Ok(not_parked);
        }
        // PostgreSQL cannot read one of the payloads, such as JSON that is nested too deeply.
        Err(error) if is_data_error(&error) => attempt.rollback().await?,
        Err(error) => return Err(error),
    }
    let mut not_parked = Vec::new();
    for one in new {
        let mut attempt = tx.begin().await?;
        match insert_all(&mut attempt, consumer, std::slice::from_ref(one)).await {
            Ok(refused) => {
                attempt.commit().await?;
                not_parked.extend(refused);
            }
            Err(error) if is_data_error(&error) => {
                attempt.rollback().await?;
                let failed = one.last_error.map(|failed| format!("{failed}; ")).unwrap_or_default();
                let reason = format!("{failed}it cannot be parked: {}", redacted_error(&error));
                not_parked.push(NotParked { new: one, reason });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(not_parked)
}

/// Parks the messages in one statement. Returns those that cannot be parked, because another message with the same id is parked,
/// or is parked now.
async fn insert_all<'n>(
    tx: &mut PgConnection,
    consumer: &str,
    new: &'n [NewParked<'n>],
) -> sqlx::Result<Vec<NotParked<'n>>> {
    let text = |of: fn(&Message) -> Option<&str>| new.iter().map(|parked| of(parked.message)).collect::<Vec<_>>();
    let aggregate_id = |parked: &NewParked<'_>| parked.message.aggregate_id.as_ref().map(AggregateId::to_json);
    let inserted = sqlx::query(
        "insert into pillarbox.parked (consumer, shard, run, attempts, next_at, last_error, log_id, message_id, source,
             tenant, topic, key, aggregate_type, aggregate_id, headers, payload, at)
         select $1, shard, run, attempts, next_at, last_error, log_id, message_id, source, tenant, topic, key,
             aggregate_type, aggregate_id::json, headers::jsonb, payload::json, at
         from unnest($2::smallint[], $3::integer[], $4::integer[], $5::timestamptz[], $6::text[], $7::bigint[],
             $8::uuid[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[],
             $16::text[], $17::timestamptz[]) with ordinality
             as new (shard, run, attempts, next_at, last_error, log_id, message_id, source, tenant, topic, key,
                     aggregate_type, aggregate_id, headers, payload, at, n)
         order by new.n
         on conflict (consumer, message_id, run) do nothing",
    )
    .bind(consumer)
    .bind(new.iter().map(|parked| parked.message.shard).collect::<Vec<_>>())
    .bind(new.iter().map(|parked| parked.run).collect::<Vec<_>>())
    .bind(new.iter().map(|parked| parked.attempts).collect::<Vec<_>>())
    .bind(new.iter().map(|parked| parked.next_at).collect::<Vec<_>>())
    .bind(new.iter().map(|parked| parked.last_error).collect::<Vec<_>>())
    .bind(new.iter().map(|parked| parked.message.id).collect::<Vec<_>>())
    .bind(new.iter().map(|parked| parked.message.message_id).collect::<Vec<_>>())
    .bind(text(|message| Some(&message.source)))
    .bind(text(|message| Some(&message.tenant)))
    .bind(text(|message| Some(&message.topic)))
    .bind(text(|message| message.key.as_deref()))
    .bind(text(|message| message.aggregate_type.as_deref()))
    .bind(new.iter().map(aggregate_id).collect::<Vec<_>>())
    .bind(text(|message| Some(message.headers.get())))
    .bind(text(|message| Some(message.payload.get())))
    .bind(new.iter().map(|parked| parked.message.at).collect::<Vec<_>>())
    .execute(&mut *tx)
    .await?
    .rows_affected();
    if inserted == new.len() as u64 { Ok(Vec::new()) } else { with_id_of_another(tx, consumer, new).await }
}

/// Returns the messages whose id is that of another parked message. An id identifies a message; but nothing in the log
/// enforces it, and a message must not be lost because of another one.
async fn with_id_of_another<'n>(
    db: &mut PgConnection,
    consumer: &str,
    new: &'n [NewParked<'n>],
) -> sqlx::Result<Vec<NotParked<'n>>> {
    let query = "select new.n from unnest($2::uuid[], $3::integer[], $4::bigint[]) with ordinality
                                   as new (message_id, run, log_id, n)
                 join pillarbox.parked on consumer = $1 and parked.message_id = new.message_id and parked.run = new.run
                 where parked.log_id <> new.log_id order by new.n";
    let numbers: Vec<i64> = sqlx::query_scalar(query)
        .bind(consumer)
        .bind(new.iter().map(|parked| parked.message.message_id).collect::<Vec<_>>())
        .bind(new.iter().map(|parked| parked.run).collect::<Vec<_>>())
        .bind(new.iter().map(|parked| parked.message.id).collect::<Vec<_>>())
        .fetch_all(db)
        .await?;
    let found = numbers.into_iter().filter_map(|number| new.get(number as usize - 1));
    Ok(found.map(|new| NotParked { new, reason: ID_IN_USE.to_owned() }).collect())
}

/// Returns the keys of these shards that have parked messages. Later messages of these keys must wait.
pub(super) async fn blocked_keys(
    db: &mut PgConnection,
    consumer: &str,
    shards: &[i16],
) -> sqlx::Result<Vec<(i16, Key)>> {
    let rows: Vec<(i16, String, String)> = sqlx::query_as(
        "select distinct shard, tenant, key from pillarbox.parked
         where consumer = $1 and shard = any($2::smallint[]) and key is not null",
    )
    .bind(consumer)
    .bind(shards)
    .fetch_all(db)
    .await?;
    Ok(rows.into_iter().map(|(shard, tenant, key)| (shard, (tenant, key))).collect())
}

/// Returns which of these keys still have parked messages.
pub(super) async fn still_blocked(
    db: &mut PgConnection,
    consumer: &str,
    keys: &HashSet<Key>,
) -> sqlx::Result<HashSet<Key>> {
    let (tenants, keys): (Vec<&str>, Vec<&str>) = keys.iter().map(|(t, k)| (t.as_str(), k.as_str())).unzip();
    let found: Vec<Key> = sqlx::query_as(
        "select tenant, key from unnest($2::text[], $3::text[]) as candidate (tenant, key)
         where exists (select from pillarbox.parked
                       where parked.consumer = $1 and parked.tenant = candidate.tenant and parked.key = candidate.key)",
    )
    .bind(consumer)
    .bind(tenants)
    .bind(keys)
    .fetch_all(db)
    .await?;
    Ok(found.into_iter().collect())
}

/// Returns the messages that are due, each with some of the messages that wait for it, so that a long queue of a key does
/// not proceed one message at a time.
pub(super) async fn due(
    db: &mut PgConnection,
    consumer: &str,
    shards: &[i16],
    now: DateTime<Utc>,
    limit: u32,
) -> sqlx::Result<Vec<Delivery>> {
    // A dead letter that an operator retries is due even if earlier messages of its key are parked. Then the messages that
    // wait are not returned with it, because they would overtake the earlier ones.
    let rows = sqlx::query(
        "with head as (
             select * from pillarbox.parked
             where consumer = $1 and shard = any($2::smallint[]) and next_at <= $3 order by next_at limit $4
         ), behind as (
             select follower.* from head cross join lateral (
                 select * from pillarbox.parked
                 where consumer = $1 and tenant = head.tenant and key = head.key and id > head.id
                   and next_at is null
                   and not exists (select from pillarbox.parked as earlier
                                   where consumer = $1 and tenant = head.tenant and key = head.key
                                     and id < head.id)
                 order by id limit greatest(1, $4 / (select count(*) from head))
             ) follower
         )
         select * from head union all select * from behind order by id",
    )
    .bind(consumer)
    .bind(shards)
    .bind(now)
    .bind(i64::from(limit))
    .fetch_all(db)
    .await?;
    let delivery = |row| -> sqlx::Result<Delivery> {
        Ok(Delivery {
            run: Row::try_get(row, "run")?,
            is_replayed: false,
            origin: Origin::Parked {
                id: Row::try_get(row, "id")?,
                attempts: Row::try_get(row, "attempts")?,
                discarded: Row::try_get(row, "discarded")?,
            },
            message: Message::from_copy_row(row)?,
        })
    };
    rows.iter().map(delivery).collect()
}

/// Returns when the next message is due.
pub(super) async fn next_due(
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

/// Schedules the next retry of a message that failed again.
pub(super) async fn retry_at(
    tx: &mut PgConnection,
    id: i64,
    attempts: i32,
    next_at: DateTime<Utc>,
    error: &str,
) -> sqlx::Result<()> {
    let query = "update pillarbox.parked set attempts = $2, next_at = $3, last_error = $4 where id = $1";
    sqlx::query(query).bind(id).bind(attempts).bind(next_at).bind(error).execute(tx).await.map(drop)
}

/// Deletes messages that are done and messages that an operator discarded.
pub(super) async fn delete(tx: &mut PgConnection, done: &[i64], discarded: &[i64]) -> sqlx::Result<()> {
    let query = "delete from pillarbox.parked where id = any($1)";
    sqlx::query(query).bind(discarded).execute(&mut *tx).await?;
    let query = "delete from pillarbox.parked where id = any($1) returning discarded, consumer, message_id";
    let done: Vec<(bool, String, Uuid)> = sqlx::query_as(query).bind(done).fetch_all(&mut *tx).await?;
    // A message that an operator discarded while it was being processed is done after all, and not discarded.
    for (_, consumer, message_id) in done.into_iter().filter(|(discarded, ..)| *discarded) {
        let query = "delete from pillarbox.discarded where consumer = $1 and message_id = $2";
        sqlx::query(query).bind(consumer).bind(message_id).execute(&mut *tx).await?;
    }
    Ok(())
}

/// Turns a parked message into a dead letter.
pub(super) async fn give_up(tx: &mut PgConnection, id: i64, attempts: i32, error: &str) -> sqlx::Result<()> {
    let query = format!(
        "with given_up as (delete from pillarbox.parked where id = $1 returning *)
         insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, {CONTENT})
         select consumer, shard, run, $2, $3, {CONTENT} from given_up"
    );
    let query = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).bind(attempts).bind(error);
    query.execute(tx).await.map(drop)
}

/// Makes a message that was not parked a dead letter. Returns false and changes nothing if it is parked, as a replayed
/// message can be: its parked copy decides.
pub(super) async fn give_up_new(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    new: NewParked<'_>,
) -> sqlx::Result<bool> {
    let query = "select exists (select from pillarbox.parked
                                where consumer = $1 and message_id = $2 and run = $3 and log_id = $4)";
    let query = sqlx::query_scalar(query).bind(consumer).bind(new.message.message_id).bind(new.run);
    if query.bind(new.message.id).fetch_one(&mut **tx).await? {
        return Ok(false);
    }
    insert_dead_letter(tx, consumer, &new, new.last_error.unwrap_or_default()).await?;
    Ok(true)
}

/// Inserts a dead letter of a message that is not parked. If PostgreSQL cannot read its payload, the dead letter has the
/// payload as one JSON string.
pub(super) async fn insert_dead_letter(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    new: &NewParked<'_>,
    error: &str,
) -> sqlx::Result<()> {
    let mut attempt = tx.begin().await?;
    let payload = new.message.payload.get();
    match insert_dead_letter_with(&mut attempt, consumer, new, payload, error).await {
        Ok(()) => return attempt.commit().await,
        Err(cause) if is_data_error(&cause) => attempt.rollback().await?,
        Err(cause) => return Err(cause),
    }
    insert_dead_letter_with(tx, consumer, new, &Value::from(payload).to_string(), error).await
}

async fn insert_dead_letter_with(
    db: &mut PgConnection,
    consumer: &str,
    NewParked { message, run, attempts, .. }: &NewParked<'_>,
    payload: &str,
    error: &str,
) -> sqlx::Result<()> {
    let query = format!(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, {CONTENT})
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13::json, $14::jsonb, $15::json, $16)"
    );
    sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(consumer)
        .bind(message.shard)
        .bind(run)
        .bind(attempts)
        .bind(error)
        .bind(message.id)
        .bind(message.message_id)
        .bind(&message.source)
        .bind(&message.tenant)
        .bind(&message.topic)
        .bind(&message.key)
        .bind(&message.aggregate_type)
        .bind(message.aggregate_id.as_ref().map(AggregateId::to_json))
        .bind(message.headers.get())
        .bind(payload)
        .bind(message.at)
        .execute(db)
        .await
        .map(drop)
}

/// Makes the first message of each of these keys due now, unless it already has a time.
pub(super) async fn unblock(
    tx: &mut PgConnection,
    consumer: &str,
    keys: &HashSet<Key>,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let (tenants, keys): (Vec<&str>, Vec<&str>) = keys.iter().map(|(t, k)| (t.as_str(), k.as_str())).unzip();
    sqlx::query(
        "update pillarbox.parked set next_at = $4
         from unnest($2::text[], $3::text[]) as changed (tenant, key)
         cross join lateral (
             select id from pillarbox.parked
             where consumer = $1 and tenant = changed.tenant and key = changed.key order by id limit 1
         ) as head
         where parked.id = head.id and parked.next_at is null",
    )
    .bind(consumer)
    .bind(tenants)
    .bind(keys)
    .bind(now)
    .execute(tx)
    .await
    .map(drop)
}

/// Turns all parked messages of one consumer, or of all consumers, into dead letters.
pub(crate) async fn give_up_all(tx: &mut PgConnection, consumer: Option<&str>, reason: &str) -> sqlx::Result<u64> {
    let query = format!(
        "with given_up as (delete from pillarbox.parked where $1::text is null or consumer = $1 returning *)
         insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, {CONTENT})
         select consumer, shard, run, attempts, $2, {CONTENT} from given_up order by id"
    );
    Ok(sqlx::query(sqlx::AssertSqlSafe(query)).bind(consumer).bind(reason).execute(tx).await?.rows_affected())
}
