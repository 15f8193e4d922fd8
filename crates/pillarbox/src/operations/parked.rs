//! Parked messages as operators see them: list, retry now, discard.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{FromRow, PgConnection, PgExecutor, Row};

use crate::log::Message;

/// A parked message.
#[derive(Debug)]
pub struct ParkedMessage {
    /// Its number among the parked messages.
    pub id: i64,
    /// The consumer that failed.
    pub consumer: String,
    /// How often it was tried.
    pub attempts: i32,
    /// None: it waits for an earlier message of its key.
    pub next_at: Option<DateTime<Utc>>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// When it was parked.
    pub parked_at: DateTime<Utc>,
    /// An operator discarded it, and the owner of its shard has not deleted it yet.
    pub discarded: bool,
    /// The message.
    pub message: Message,
}

/// The result of retrying a parked message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryResult {
    /// It is due now.
    Scheduled,
    /// There is no such message.
    NotFound,
    /// An earlier message of its key, with this id, must be retried first.
    Behind(i64),
}

/// Returns the parked messages of one consumer, or of all, with an id above `after`, in the order in which they were
/// parked.
pub async fn list(
    db: impl PgExecutor<'_>,
    consumer: Option<&str>,
    after: Option<i64>,
    limit: i64,
) -> sqlx::Result<Vec<ParkedMessage>> {
    let query = "select * from pillarbox.parked
                 where ($1::text is null or consumer = $1) and id > $2 order by id limit $3";
    sqlx::query_as(query).bind(consumer).bind(after.unwrap_or(0)).bind(limit).fetch_all(db).await
}

impl FromRow<'_, PgRow> for ParkedMessage {
    fn from_row(row: &PgRow) -> sqlx::Result<ParkedMessage> {
        Ok(ParkedMessage {
            id: row.try_get("id")?,
            consumer: row.try_get("consumer")?,
            attempts: row.try_get("attempts")?,
            next_at: row.try_get("next_at")?,
            last_error: row.try_get("last_error")?,
            parked_at: row.try_get("parked_at")?,
            discarded: row.try_get("discarded")?,
            message: Message::from_copy_row(row)?,
        })
    }
}

/// Makes a message due now. The owner of its shard processes it within seconds.
pub async fn retry(tx: &mut PgConnection, id: i64) -> sqlx::Result<RetryResult> {
    let query = format!("select ({FIRST_EARLIER}) from pillarbox.parked where id = $1 for update");
    let first: Option<Option<i64>> =
        sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(id).fetch_optional(&mut *tx).await?;
    match first {
        None => Ok(RetryResult::NotFound),
        Some(Some(earlier)) => Ok(RetryResult::Behind(earlier)),
        Some(None) => {
            let query = "update pillarbox.parked set next_at = now() where id = $1";
            sqlx::query(query).bind(id).execute(tx).await?;
            Ok(RetryResult::Scheduled)
        }
    }
}

/// Marks a message as discarded. The owner of its shard skips it, now or when its turn comes. Returns false if there is
/// no such message.
pub async fn discard(db: impl PgExecutor<'_>, id: i64) -> sqlx::Result<bool> {
    // A message that waits for another one stays where it is: later messages must not overtake the earlier ones.
    let query = format!(
        "with removed as (
             update pillarbox.parked set discarded = true,
                 next_at = case when ({FIRST_EARLIER}) is null then now() else next_at end
             where id = $1 returning consumer, message_id, run, log_id, attempts, last_error
         ), recorded as ({RECORD_DISCARDED})
         select count(*) from removed"
    );
    Ok(sqlx::query_scalar::<_, i64>(sqlx::AssertSqlSafe(query)).bind(id).fetch_one(db).await? > 0)
}

/// Records the rows of `removed` as discarded, so that they are not shown as sent. Messages of a repeating replay were
/// processed before, and messages that never were in the log have no status: neither is recorded.
pub(super) const RECORD_DISCARDED: &str = "
    insert into pillarbox.discarded (consumer, message_id, attempts, last_error)
    select distinct on (consumer, message_id) consumer, message_id, attempts, last_error from removed
    where run = 0 and log_id > 0
    on conflict (consumer, message_id) do update
        set attempts = excluded.attempts, last_error = excluded.last_error, discarded_at = excluded.discarded_at";

/// The id of the first message with the same key, if that is not the message itself.
const FIRST_EARLIER: &str = "
    select min(earlier.id) from pillarbox.parked as earlier
    where earlier.consumer = parked.consumer and earlier.tenant = parked.tenant and earlier.key = parked.key
      and earlier.id < parked.id";
