//! Dead letters as operators see them: list, retry, discard; and dead letters that never were in the log.

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{FromRow, PgExecutor, Postgres, Row, Transaction};

use super::parked::RECORD_DISCARDED;
use crate::consumers::dead_letter_notice;
use crate::consumers::parked_messages::CONTENT;
use crate::database::Database;
use crate::log::{Message, Tenant};

/// A message that was given up after its retries.
#[derive(Debug)]
pub struct DeadLetter {
    /// Its number among the dead letters.
    pub id: i64,
    /// The consumer that gave it up.
    pub consumer: String,
    /// How often it was tried.
    pub attempts: i32,
    /// Why the last attempt failed.
    pub last_error: String,
    /// When it was given up.
    pub died_at: DateTime<Utc>,
    /// The message.
    pub message: Message,
}

/// Selects dead letters. None in a field means any.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// Only this one.
    pub id: Option<i64>,
    /// Only those of this consumer.
    pub consumer: Option<String>,
    /// This topic and all topics below it.
    pub topic: Option<String>,
    /// Only those of this tenant.
    pub tenant: Option<String>,
    /// Given up at this time or later.
    pub from: Option<DateTime<Utc>>,
    /// Given up before this time.
    pub to: Option<DateTime<Utc>>,
    /// The highest id, so that messages that die during a bulk operation are not selected.
    pub id_max: Option<i64>,
}

/// The number of dead letters in each transaction of a bulk operation.
const STEP: i64 = 1_000;
/// The number of dead letters after which a bulk operation ends; the caller repeats it for more.
const BULK_MAX: u64 = 100_000;

/// The result of a bulk operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bulk {
    /// How many dead letters it changed.
    pub count: u64,
    /// There may be more: repeat the request.
    pub more: bool,
}

const IS_SELECTED: &str = "
    ($1::bigint is null or id = $1) and ($2::text is null or consumer = $2)
    and ($3::text is null or topic = $3 or starts_with(topic, $3 || '.'))
    and ($4::text is null or tenant = $4)
    and ($5::timestamptz is null or died_at >= $5) and ($6::timestamptz is null or died_at < $6)
    and ($7::bigint is null or id <= $7)";

/// Whether `other` is another message with the same id. A consumer has at most one of them parked.
const HAS_SAME_ID: &str = "other.consumer = dead_letter.consumer and other.message_id = dead_letter.message_id
    and other.run = dead_letter.run and other.log_id <> dead_letter.log_id";

/// Returns the selected dead letters with an id above `after`, oldest first.
pub async fn list(
    db: impl PgExecutor<'_>,
    selection: &Selection,
    after: Option<i64>,
    limit: i64,
) -> sqlx::Result<Vec<DeadLetter>> {
    let query = format!(
        "select * from pillarbox.dead_letter
         where {IS_SELECTED} and id > $8 order by id limit $9"
    );
    let selected = selection.bind(sqlx::query_as(sqlx::AssertSqlSafe(query)));
    selected.bind(after.unwrap_or(0)).bind(limit).fetch_all(db).await
}

/// Parks up to `limit` dead letters again, oldest first, with all their retries. Returns how many. Skips those whose
/// consumer does not exist, and those whose id is that of another message that is parked, or is also selected and older.
pub async fn retry(db: impl PgExecutor<'_>, selection: &Selection, limit: i64) -> sqlx::Result<u64> {
    let query = format!(
        "with selected as (
             select id from pillarbox.dead_letter
             where {IS_SELECTED} and exists (select from pillarbox.cursor where cursor.consumer = dead_letter.consumer)
               and not exists (select from pillarbox.parked as other where {HAS_SAME_ID})
               and not exists (select from pillarbox.dead_letter as other
                               where {IS_SELECTED} and {HAS_SAME_ID} and other.id < dead_letter.id)
             order by id limit $8 for update skip locked
         ), removed as (delete from pillarbox.dead_letter using selected where dead_letter.id = selected.id returning dead_letter.*),
         parked as (
             insert into pillarbox.parked (consumer, shard, run, attempts, next_at, last_error, {CONTENT})
             select consumer, shard, run, 0, now(), last_error, {CONTENT} from removed order by id
             on conflict (consumer, message_id, run) do nothing)
         select count(*) from removed"
    );
    // Of two dead letters of the same message only one is parked, but both are deleted and both count.
    let counted = selection.bind(sqlx::query_as(sqlx::AssertSqlSafe(query))).bind(limit);
    let (count,): (i64,) = counted.fetch_one(db).await?;
    Ok(count.unsigned_abs())
}

/// Counts all dead letters up to `max`, so that the cost does not grow with their number.
pub async fn count_up_to(db: impl PgExecutor<'_>, max: i64) -> sqlx::Result<i64> {
    let query = "select count(*) from (select from pillarbox.dead_letter limit $1) as counted";
    sqlx::query_scalar(query).bind(max).fetch_one(db).await
}

/// Counts the selected dead letters whose consumer does not exist, by the name of the consumer.
pub async fn without_consumer(db: impl PgExecutor<'_>, selection: &Selection) -> sqlx::Result<Vec<(String, i64)>> {
    let query = format!(
        "select consumer, count(*) from pillarbox.dead_letter
         where {IS_SELECTED} and not exists (select from pillarbox.cursor where cursor.consumer = dead_letter.consumer)
         group by consumer order by consumer"
    );
    selection.bind(sqlx::query_as(sqlx::AssertSqlSafe(query))).fetch_all(db).await
}

/// Discards up to `limit` dead letters. Returns how many.
pub async fn discard(db: impl PgExecutor<'_>, selection: &Selection, limit: i64) -> sqlx::Result<u64> {
    let query = format!(
        "with removed as (
             delete from pillarbox.dead_letter where id in
                 (select id from pillarbox.dead_letter where {IS_SELECTED} order by id limit $8)
             returning consumer, message_id, run, log_id, attempts, last_error
         ), recorded as ({RECORD_DISCARDED})
         select count(*) from removed"
    );
    let counted = selection.bind(sqlx::query_as(sqlx::AssertSqlSafe(query))).bind(limit);
    let (count,): (i64,) = counted.fetch_one(db).await?;
    Ok(count.unsigned_abs())
}

/// Retries all selected dead letters, in steps. Only those that are dead when it begins, so that a message that dies
/// again is not retried forever.
pub async fn retry_many(db: &Database, selection: &Selection) -> sqlx::Result<Bulk> {
    in_steps(db, selection, Step::Retry).await
}

/// Discards all selected dead letters, in steps.
pub async fn discard_many(db: &Database, selection: &Selection) -> sqlx::Result<Bulk> {
    in_steps(db, selection, Step::Discard).await
}

enum Step {
    Retry,
    Discard,
}

async fn in_steps(db: &Database, selection: &Selection, step: Step) -> sqlx::Result<Bulk> {
    let selection = selection.until_now(db).await?;
    let mut count = 0;
    while count < BULK_MAX {
        let changed = match step {
            Step::Retry => retry(&mut *db.acquire().await?, &selection, STEP).await?,
            Step::Discard => discard(&mut *db.acquire().await?, &selection, STEP).await?,
        };
        count += changed;
        if changed < STEP.unsigned_abs() {
            return Ok(Bulk { count, more: false });
        }
    }
    Ok(Bulk { count, more: true })
}

/// A message from a broker that could not be posted.
pub struct UnusableMessage<'a> {
    /// The name under which it is shown.
    pub consumer: &'a str,
    /// Who posted it.
    pub source: &'a str,
    /// Whose message it is.
    pub tenant: &'a Tenant,
    /// Its topic.
    pub topic: &'a str,
    /// Its key.
    pub key: Option<&'a str>,
    /// Its headers.
    pub headers: &'a RawValue,
    /// Its payload.
    pub payload: &'a RawValue,
    /// Why it cannot be posted.
    pub error: &'a str,
}

/// Stores the message as a dead letter and posts a notice of it.
pub async fn store_unusable(tx: &mut Transaction<'_, Postgres>, unusable: &UnusableMessage<'_>) -> sqlx::Result<()> {
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
    let message = Message::from_copy_row(&row)?;
    dead_letter_notice::post_notice(tx, unusable.consumer, &message, 1, unusable.error).await
}

/// Returns the topic of the messages that report a consumer's dead letters.
pub fn topic_of(consumer: &str) -> String {
    dead_letter_notice::topic_of(consumer)
}

type QueryAs<'q, T> = sqlx::query::QueryAs<'q, Postgres, T, sqlx::postgres::PgArguments>;

impl Selection {
    fn bind<'q, T>(&'q self, query: QueryAs<'q, T>) -> QueryAs<'q, T> {
        let query = query.bind(self.id).bind(&self.consumer).bind(&self.topic).bind(&self.tenant);
        query.bind(self.from).bind(self.to).bind(self.id_max)
    }

    /// The same selection, limited to the dead letters that exist now.
    async fn until_now(&self, db: &Database) -> sqlx::Result<Selection> {
        let newest = sqlx::query_scalar("select max(id) from pillarbox.dead_letter");
        let newest = newest.fetch_one(&mut *db.acquire().await?).await?;
        Ok(Selection { id_max: Some(self.id_max.or(newest).unwrap_or(0)), ..self.clone() })
    }
}

impl FromRow<'_, PgRow> for DeadLetter {
    fn from_row(row: &PgRow) -> sqlx::Result<DeadLetter> {
        Ok(DeadLetter {
            id: row.try_get("id")?,
            consumer: row.try_get("consumer")?,
            attempts: row.try_get("attempts")?,
            last_error: row.try_get("last_error")?,
            died_at: row.try_get("died_at")?,
            message: Message::from_copy_row(row)?,
        })
    }
}
