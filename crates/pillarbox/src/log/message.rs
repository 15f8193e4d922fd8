//! Messages as the log stores them, and references to them.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use runtime::trace::TraceContext;
use serde::Deserialize;
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::confidential;
use super::post::{AggregateId, FROM_QUEUE, ORIGINAL_ID, Source, TRACEPARENT};

/// The headers of a message that are meant for Pillarbox itself.
const INTERNAL_HEADERS: [&str; 4] = [TRACEPARENT, SOURCE_EVENT_ID, ORIGINAL_ID, confidential::HEADER];
const SOURCE_EVENT_ID: &str = "source_event_id";

/// One entry of the log.
#[derive(Debug, Clone)]
pub struct Message {
    /// Its number in the log, assigned by the database: it orders the messages of a shard, and is not known outside.
    pub id: i64,
    /// The part of the log that its key belongs to.
    pub shard: i16,
    /// Its public id, which is the same on every channel and can be chosen by the poster.
    pub message_id: Uuid,
    /// Who posted it.
    pub source: String,
    /// The tenant it was posted for.
    pub tenant: String,
    /// What it is about, such as `order.created`.
    pub topic: String,
    /// Messages with the same key are processed in order.
    pub key: Option<String>,
    /// The type of what it is about.
    pub aggregate_type: Option<String>,
    /// The id of what it is about.
    pub aggregate_id: Option<AggregateId>,
    /// Unparsed, so that unexpected headers cannot make a reader fail.
    pub headers: Box<RawValue>,
    /// The text as it was posted.
    pub payload: Box<RawValue>,
    /// When it was posted.
    pub at: DateTime<Utc>,
}

/// A reference to a message in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogRef {
    /// The shard of the message.
    pub shard: i16,
    /// Its number in the log.
    pub id: i64,
    /// Selects the partition.
    pub at: DateTime<Utc>,
}

impl Message {
    /// Returns the reference to it.
    pub fn log_ref(&self) -> LogRef {
        LogRef { shard: self.shard, id: self.id, at: self.at }
    }

    /// The tenant and the key, which together select the messages that are processed in order.
    pub(crate) fn ordering_key(&self) -> Option<(String, String)> {
        self.key.as_ref().map(|key| (self.tenant.clone(), key.clone()))
    }

    /// Returns the trace that the message was posted in, if its headers have a valid `traceparent`.
    pub fn trace(&self) -> Option<TraceContext> {
        #[derive(Deserialize)]
        struct Headers {
            traceparent: Option<String>,
        }
        let headers: Headers = serde_json::from_str(self.headers.get()).ok()?;
        headers.traceparent?.parse().ok()
    }

    /// Returns the id that the producer of a business event knows it by, if that differs from the id of the message.
    pub fn source_event_id(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Headers {
            source_event_id: Option<String>,
        }
        let headers: Headers = serde_json::from_str(self.headers.get()).ok()?;
        headers.source_event_id
    }

    /// Returns the headers that a producer has posted in SQL for the consumers of the message, by name.
    pub fn producer_headers(&self) -> BTreeMap<String, String> {
        // The messages of services have no other headers than their own, and there are many of them.
        if ![Source::SQL.as_str(), Source::BUSINESS_EVENTS.as_str()].contains(&&*self.source) {
            return BTreeMap::new();
        }
        let mut headers: BTreeMap<String, String> = serde_json::from_str(self.headers.get()).unwrap_or_default();
        headers.retain(|name, _| !INTERNAL_HEADERS.contains(&&**name));
        headers
    }

    /// Returns the id that a service has posted the message with, in this or another database. It differs from the id here if the
    /// message came over RabbitMQ and its producer has chosen the id.
    pub fn original_id(&self) -> Uuid {
        #[derive(Deserialize)]
        struct Headers {
            original_id: Option<Uuid>,
        }
        // Anybody who posts in SQL chooses the headers. Those of messages from a queue are set by the intake.
        let is_from_queue = self.source.starts_with(FROM_QUEUE);
        let headers = || serde_json::from_str::<Headers>(self.headers.get()).ok()?.original_id;
        is_from_queue.then(headers).flatten().unwrap_or(self.message_id)
    }

    /// The approximate memory use of its content, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.payload.get().len() + self.headers.get().len()
    }

    /// Decodes a row of the log.
    pub(crate) fn from_log_row(row: &PgRow) -> sqlx::Result<Message> {
        Message::from_row(row, "id")
    }

    /// Decodes a row of a table that stores copies of messages. There, `id` is the row's own id and `log_id` the
    /// message's.
    pub(crate) fn from_copy_row(row: &PgRow) -> sqlx::Result<Message> {
        Message::from_row(row, "log_id")
    }

    fn from_row(row: &PgRow, id_column: &str) -> sqlx::Result<Message> {
        let raw = |column| row.try_get::<Json<Box<RawValue>>, _>(column).map(|Json(text)| text);
        Ok(Message {
            id: row.try_get(id_column)?,
            shard: row.try_get("shard")?,
            message_id: row.try_get("message_id")?,
            source: row.try_get("source")?,
            tenant: row.try_get("tenant")?,
            topic: row.try_get("topic")?,
            key: row.try_get("key")?,
            aggregate_type: row.try_get("aggregate_type")?,
            aggregate_id: row.try_get::<Option<Json<AggregateId>>, _>("aggregate_id")?.map(|Json(id)| id),
            headers: raw("headers")?,
            payload: raw("payload")?,
            at: row.try_get("at")?,
        })
    }
}

/// Loads the referenced messages in their order, until they have `bytes_max` bytes of payload together: it returns the message that
/// reaches this size, and none after it. None in the result: retention has dropped the message.
pub async fn load_up_to(
    db: &mut PgConnection,
    refs: &[LogRef],
    bytes_max: usize,
) -> sqlx::Result<Vec<Option<Message>>> {
    let rows = sqlx::query(
        "select * from (
             select found.*, log_ref.n as position,
                 coalesce(sum(octet_length(found.payload::text)) over
                     (order by log_ref.n rows between unbounded preceding and 1 preceding), 0) as bytes_before
             from unnest($1::smallint[], $2::bigint[], $3::timestamptz[]) with ordinality as log_ref (shard, id, at, n)
             left join lateral (
                 select * from pillarbox.log
                 where log.shard = log_ref.shard and log.id = log_ref.id and log.at = log_ref.at
             ) found on true
         ) loaded where bytes_before < $4 order by position",
    )
    .bind(refs.iter().map(|log_ref| log_ref.shard).collect::<Vec<_>>())
    .bind(refs.iter().map(|log_ref| log_ref.id).collect::<Vec<_>>())
    .bind(refs.iter().map(|log_ref| log_ref.at).collect::<Vec<_>>())
    .bind(bytes_max as i64)
    .fetch_all(db)
    .await?;
    let message = |row: &PgRow| {
        let is_found = row.try_get::<Option<i64>, _>("id")?.is_some();
        is_found.then(|| Message::from_log_row(row)).transpose()
    };
    rows.iter().map(message).collect()
}

/// Loads the referenced messages, in no particular order. Messages that retention has dropped are missing in the
/// result.
pub async fn load_messages(db: &mut PgConnection, refs: &[LogRef]) -> sqlx::Result<Vec<Message>> {
    let rows = sqlx::query(
        "select found.* from unnest($1::smallint[], $2::bigint[], $3::timestamptz[]) as log_ref (shard, id, at)
         cross join lateral (
             select * from pillarbox.log where log.shard = log_ref.shard and log.id = log_ref.id and log.at = log_ref.at
         ) found",
    )
    .bind(refs.iter().map(|log_ref| log_ref.shard).collect::<Vec<_>>())
    .bind(refs.iter().map(|log_ref| log_ref.id).collect::<Vec<_>>())
    .bind(refs.iter().map(|log_ref| log_ref.at).collect::<Vec<_>>())
    .fetch_all(db)
    .await?;
    rows.iter().map(Message::from_log_row).collect()
}
