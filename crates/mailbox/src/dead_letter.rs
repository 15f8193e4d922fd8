//! Messages that were given up: to be looked at, tried again or thrown away.

use chrono::{DateTime, Utc};
use contracts::{EventId, MESSAGE_BYTES_MAX};
use kit::auth::Tenant;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use sqlx::postgres::PgRow;
use sqlx::{PgExecutor, PgPool, Postgres, Row, Transaction};
use utoipa::ToSchema;

use crate::log::{self, Message};
use crate::parked::{CONTENT, NOTE_DISCARDED};
use crate::post::{AggregateId, Post, PostError, Source, post};

/// What the mailbox itself posts.
const SOURCE: Source = Source::new("mailbox");

#[derive(Debug)]
pub struct DeadLetter {
    pub id: i64,
    pub consumer: String,
    pub attempts: i32,
    pub last_error: String,
    pub died_at: DateTime<Utc>,
    pub message: Message,
}

/// Which of them; None is any.
#[derive(Debug, Clone, Default)]
pub struct Which {
    pub id: Option<i64>,
    pub consumer: Option<String>,
    /// This topic and what is below it.
    pub topic: Option<String>,
    pub tenant: Option<String>,
    pub from: Option<DateTime<Utc>>,
    pub to: Option<DateTime<Utc>>,
    /// None with a higher id: what dies while others are tried again is not meant.
    pub id_max: Option<i64>,
}

/// Bulk goes in steps, each a transaction, and ends here: who wants more asks again.
const STEP: i64 = 1_000;
const BULK_MAX: u64 = 100_000;

/// What came of many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct Bulk {
    /// How many it was done to.
    pub count: u64,
    /// There may be more: ask again.
    pub more: bool,
}

const IS_MEANT: &str = "
    ($1::bigint is null or id = $1) and ($2::text is null or consumer = $2)
    and ($3::text is null or topic = $3 or starts_with(topic, $3 || '.'))
    and ($4::text is null or tenant = $4)
    and ($5::timestamptz is null or died_at >= $5) and ($6::timestamptz is null or died_at < $6)
    and ($7::bigint is null or id <= $7)";

/// Oldest first, behind `after`.
pub async fn list(
    db: impl PgExecutor<'_>,
    which: &Which,
    after: Option<i64>,
    limit: i64,
) -> sqlx::Result<Vec<DeadLetter>> {
    let query = format!(
        "select * from pillarbox.dead_letter
         where {IS_MEANT} and id > $8 order by id limit $9"
    );
    let rows = which.bind(sqlx::query(sqlx::AssertSqlSafe(query))).bind(after.unwrap_or(0)).bind(limit);
    rows.fetch_all(db).await?.iter().map(dead_letter).collect()
}

/// Gives them to their consumer again, oldest first, with all their retries; returns how many. At most `limit` at a time.
pub async fn retry(db: impl PgExecutor<'_>, which: &Which, limit: i64) -> sqlx::Result<u64> {
    let query = format!(
        "with chosen as (
             select id from pillarbox.dead_letter
             where {IS_MEANT} and exists (select from pillarbox.cursor where cursor.consumer = dead_letter.consumer)
             order by id limit $8 for update skip locked
         ), back as (delete from pillarbox.dead_letter using chosen where dead_letter.id = chosen.id returning dead_letter.*),
         parked as (
             insert into pillarbox.parked (consumer, shard, run, attempts, next_at, last_error, {CONTENT})
             select consumer, shard, run, 0, now(), last_error, {CONTENT} from back order by id
             on conflict (consumer, message_id, run) do nothing)
         select count(*) from back"
    );
    // Of two that are the same message one is parked, but both are gone from here, and both count.
    let row = which.bind(sqlx::query(sqlx::AssertSqlSafe(query))).bind(limit).fetch_one(db).await?;
    Ok(row.try_get::<i64, _>(0)?.unsigned_abs())
}

/// Those that nobody is there to take again: by consumer, how many.
pub async fn without_consumer(db: impl PgExecutor<'_>, which: &Which) -> sqlx::Result<Vec<(String, i64)>> {
    let query = format!(
        "select consumer, count(*) from pillarbox.dead_letter
         where {IS_MEANT} and not exists (select from pillarbox.cursor where cursor.consumer = dead_letter.consumer)
         group by consumer order by consumer"
    );
    let rows = which.bind(sqlx::query(sqlx::AssertSqlSafe(query))).fetch_all(db).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Throws them away; returns how many. At most `limit` at a time.
pub async fn discard(db: impl PgExecutor<'_>, which: &Which, limit: i64) -> sqlx::Result<u64> {
    let query = format!(
        "with gone as (
             delete from pillarbox.dead_letter where id in
                 (select id from pillarbox.dead_letter where {IS_MEANT} order by id limit $8)
             returning consumer, message_id, run, log_id, attempts, last_error
         ), noted as ({NOTE_DISCARDED})
         select count(*) from gone"
    );
    let row = which.bind(sqlx::query(sqlx::AssertSqlSafe(query))).bind(limit).fetch_one(db).await?;
    Ok(row.try_get::<i64, _>(0)?.unsigned_abs())
}

/// [`retry`] for all of them, in steps. Only what is dead when it begins, so that what dies again is not tried for ever.
pub async fn retry_many(db: &PgPool, which: &Which) -> sqlx::Result<Bulk> {
    in_steps(db, which, Step::Retry).await
}

/// [`discard`] for all of them, in steps.
pub async fn discard_many(db: &PgPool, which: &Which) -> sqlx::Result<Bulk> {
    in_steps(db, which, Step::Discard).await
}

enum Step {
    Retry,
    Discard,
}

async fn in_steps(db: &PgPool, which: &Which, step: Step) -> sqlx::Result<Bulk> {
    let which = which.until_now(db).await?;
    let mut count = 0;
    while count < BULK_MAX {
        let done = match step {
            Step::Retry => retry(db, &which, STEP).await?,
            Step::Discard => discard(db, &which, STEP).await?,
        };
        count += done;
        if done < STEP.unsigned_abs() {
            return Ok(Bulk { count, more: false });
        }
    }
    Ok(Bulk { count, more: true })
}

/// What could not even be posted, for those who keep what a broker hands them.
pub struct Unusable<'a> {
    pub consumer: &'a str,
    pub source: &'a str,
    pub tenant: &'a Tenant,
    pub topic: &'a str,
    pub key: Option<&'a str>,
    pub headers: &'a RawValue,
    pub payload: &'a RawValue,
    pub error: &'a str,
}

/// Keeps it as a dead letter, and tells of it.
pub async fn keep_unusable(tx: &mut Transaction<'_, Postgres>, unusable: &Unusable<'_>) -> sqlx::Result<()> {
    let row = sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source,
             tenant, topic, key, headers, payload, at)
         values ($1, 0, 0, 1, $2, 0, pillarbox.uuid_v7(), $3, $4, $5, $6, $7::jsonb, $8::json, now())
         returning *",
    )
    .bind(unusable.consumer)
    .bind(unusable.error)
    .bind(unusable.source)
    .bind(unusable.tenant.as_str())
    .bind(unusable.topic)
    .bind(unusable.key)
    .bind(unusable.headers.get())
    .bind(unusable.payload.get())
    .fetch_one(&mut **tx)
    .await?;
    announce(tx, unusable.consumer, &dead_letter(&row)?.message, 1, unusable.error).await
}

/// The topic that a consumer's dead letters are announced under: words of letters, digits and `_`.
pub fn topic_of(consumer: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '.';
    let words: String = consumer.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    format!("dead_letter.{words}")
}

/// Posts that a message died, for whoever watches.
pub(crate) async fn announce(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    message: &Message,
    attempts: i32,
    error: &str,
) -> sqlx::Result<()> {
    // What belongs to a tenant stays with the dead letter.
    let content = Some(message.payload.as_ref()).filter(|_| message.tenant == Tenant::main().as_str());
    let announced = [content, None].into_iter().find_map(|payload| {
        let death = Death {
            consumer,
            attempts,
            error,
            event_id: EventId(message.message_id),
            event_type: &message.topic,
            timestamp: message.at,
            aggregate_type: message.aggregate_type.as_deref(),
            aggregate_id: message.aggregate_id.as_ref(),
            payload,
        };
        // The content stays with the dead letter when it is too large to be told.
        to_raw_value(&death).ok().filter(|text| text.get().len() <= MESSAGE_BYTES_MAX)
    });
    let Some(payload) = announced else { return Ok(()) };
    match post(tx, &SOURCE, &Post::new(topic_of(consumer), payload)).await {
        Ok(_) => Ok(()),
        Err(PostError::Database(error)) => Err(error),
        Err(refused) => {
            tracing::warn!(consumer, %refused, "a dead letter could not be announced");
            Ok(())
        }
    }
}

#[derive(Serialize)]
struct Death<'a> {
    consumer: &'a str,
    attempts: i32,
    error: &'a str,
    event_id: EventId,
    event_type: &'a str,
    timestamp: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<&'a AggregateId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a RawValue>,
}

type Query<'q> = sqlx::query::Query<'q, Postgres, sqlx::postgres::PgArguments>;

impl Which {
    fn bind<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        let query = query.bind(self.id).bind(&self.consumer).bind(&self.topic).bind(&self.tenant);
        query.bind(self.from).bind(self.to).bind(self.id_max)
    }

    async fn until_now(&self, db: &PgPool) -> sqlx::Result<Which> {
        let newest = sqlx::query_scalar("select max(id) from pillarbox.dead_letter").fetch_one(db).await?;
        Ok(Which { id_max: Some(self.id_max.or(newest).unwrap_or(0)), ..self.clone() })
    }
}

fn dead_letter(row: &PgRow) -> sqlx::Result<DeadLetter> {
    let mut message = log::message(row)?;
    message.id = row.try_get("log_id")?;
    Ok(DeadLetter {
        id: row.try_get("id")?,
        consumer: row.try_get("consumer")?,
        attempts: row.try_get("attempts")?,
        last_error: row.try_get("last_error")?,
        died_at: row.try_get("died_at")?,
        message,
    })
}
