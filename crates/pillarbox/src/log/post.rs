//! Posting messages to the log, in the same transaction as the change that they report.

use std::borrow::Cow;

use chrono::{DateTime, SecondsFormat, Utc};
use runtime::json::{LEVELS_MAX, is_too_deep};
use runtime::trace::TraceContext;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use super::confidential;
use super::tenants::Tenant;
use crate::database::ConnectionGuard;

/// The largest payload of a message, in bytes. Larger content is stored elsewhere and referenced.
pub const MESSAGE_BYTES_MAX: usize = 256 * 1024;
/// The longest topic, in characters.
const TOPIC_CHARS_MAX: usize = 200;
/// The longest key and aggregate id, in characters.
const KEY_CHARS_MAX: usize = 255;
/// The longest aggregate type, in characters.
const AGGREGATE_TYPE_CHARS_MAX: usize = 100;

/// The prefix of the sources of messages that were read from a RabbitMQ queue.
pub(super) const FROM_QUEUE: &str = "amqp:";

/// The header with the trace of a message.
pub(super) const TRACEPARENT: &str = "traceparent";
/// The header with [`Post::original_id`].
pub(super) const ORIGINAL_ID: &str = "original_id";

/// The part of the system that posts a message. It is set by code and never by a caller, so consumers can trust it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source(Cow<'static, str>);

impl Source {
    /// The source of messages that are posted in SQL.
    pub const SQL: Source = Source::new("sql");
    /// The source of business events (`pillarbox.notify`).
    pub const BUSINESS_EVENTS: Source = Source::new("notify");

    /// A source with this name.
    pub const fn new(name: &'static str) -> Source {
        Source(Cow::Borrowed(name))
    }

    /// The source of messages that were read from a RabbitMQ queue.
    pub fn from_queue(queue: &str) -> Source {
        Source(Cow::Owned(format!("{FROM_QUEUE}{queue}")))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A message to be posted.
#[derive(Debug, Clone)]
pub struct Post {
    /// Letters, digits and `_` in parts joined by dots, such as `order.created`.
    pub topic: String,
    /// Delivered byte for byte as it is here.
    pub payload: Box<RawValue>,
    /// Messages with the same key are delivered in order. A message without a key waits for no other.
    pub key: Option<String>,
    /// The type of what it is about.
    pub aggregate_type: Option<String>,
    /// The id of what it is about.
    pub aggregate_id: Option<AggregateId>,
    /// Whose message it is.
    pub tenant: Tenant,
    /// The message id, if it already has one. Must be a UUID of version 7.
    pub id: Option<Uuid>,
    /// For a message from another database: its id there, if this database cannot use it as the id.
    pub original_id: Option<Uuid>,
    /// The trace that it belongs to; None for the trace of the current task.
    pub trace: Option<TraceContext>,
    /// For a payload with secrets or personal data: the time from which it is of no use.
    pub confidential_until: Option<DateTime<Utc>>,
}

/// A number or a text: 5 and "5" are different ids, and consumers receive the same JSON type that was posted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AggregateId {
    /// A JSON number.
    Number(i64),
    /// A JSON string.
    Text(String),
}

/// Why a message was not posted.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say what they mean")]
pub enum PostError {
    #[error("topic must have at most {TOPIC_CHARS_MAX} letters, digits and _, in parts joined by dots")]
    Topic,
    #[error("key must have 1 to {KEY_CHARS_MAX} characters, without NUL")]
    Key,
    #[error(
        "aggregate_type must have 1 to {AGGREGATE_TYPE_CHARS_MAX} characters and aggregate_id 1 to {KEY_CHARS_MAX}, without NUL"
    )]
    Aggregate,
    #[error(
        "payload has {0} bytes; at most {MESSAGE_BYTES_MAX} are accepted: store larger content elsewhere and post a reference to it"
    )]
    TooLarge(usize),
    #[error("payload is nested deeper than {LEVELS_MAX} levels, which consumers cannot read: post a flatter one")]
    TooDeep,
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl AggregateId {
    pub(crate) fn to_json(&self) -> String {
        match self {
            AggregateId::Number(number) => number.to_string(),
            AggregateId::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
        }
    }
}

impl Post {
    /// A message of tenant `main`, without a key.
    pub fn new(topic: impl Into<String>, payload: Box<RawValue>) -> Post {
        Post {
            topic: topic.into(),
            payload,
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            tenant: Tenant::main(),
            id: None,
            original_id: None,
            trace: None,
            confidential_until: None,
        }
    }

    /// Sets the key.
    pub fn with_key(mut self, key: impl Into<String>) -> Post {
        self.key = Some(key.into());
        self
    }

    /// Marks the payload as confidential: no view of an operator and no log line shows it, no webhook gets it, and it is blanked
    /// in the log when every consumer has processed it, at the latest at this time.
    pub fn confidential_until(mut self, time: DateTime<Utc>) -> Post {
        self.confidential_until = Some(time);
        self
    }

    /// The headers of the message, if they differ from those of its batch, which has the trace of the current task.
    fn explicit_headers(&self, current: Option<TraceContext>) -> Option<String> {
        let is_own = self.trace.is_some() || self.confidential_until.is_some() || self.original_id.is_some();
        // Every event of the hub has these headers. A trace contains no character that JSON escapes.
        if let (Some(trace), None, None) = (self.trace, self.confidential_until, self.original_id) {
            return Some(format!(r#"{{"{TRACEPARENT}":"{trace}"}}"#));
        }
        is_own.then(|| {
            let mut headers = headers_of(self.trace.or(current), self.confidential_until);
            if let Some(id) = self.original_id {
                headers[ORIGINAL_ID] = id.to_string().into();
            }
            headers.to_string()
        })
    }

    /// Checks the message. Fails with the field that is invalid and the values that it accepts.
    pub fn check(&self) -> Result<(), PostError> {
        let plain =
            |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if self.topic.len() > TOPIC_CHARS_MAX || !self.topic.split('.').all(plain) {
            return Err(PostError::Topic);
        }
        let fits = |text: &str| (1..=KEY_CHARS_MAX).contains(&text.chars().count()) && !text.contains('\0');
        if !self.key.as_deref().is_none_or(fits) {
            return Err(PostError::Key);
        }
        let aggregate_id_fits = match &self.aggregate_id {
            Some(AggregateId::Text(text)) => fits(text),
            Some(AggregateId::Number(_)) | None => true,
        };
        let aggregate_type_fits = |text: &str| fits(text) && text.chars().count() <= AGGREGATE_TYPE_CHARS_MAX;
        if !self.aggregate_type.as_deref().is_none_or(aggregate_type_fits) || !aggregate_id_fits {
            return Err(PostError::Aggregate);
        }
        match self.payload.get().len() {
            bytes if bytes > MESSAGE_BYTES_MAX => Err(PostError::TooLarge(bytes)),
            _ if is_too_deep(self.payload.get()) => Err(PostError::TooDeep),
            _ => Ok(()),
        }
    }
}

/// Posts one message and returns its id, which stays the same in every redelivery and on every channel.
///
/// The parameter is a transaction, so that a post outside of a transaction does not compile:
///
/// ```compile_fail
/// # async fn outside(db: &sqlx::PgPool, source: &pillarbox::log::Source, message: pillarbox::log::Post) {
/// pillarbox::log::post(db, source, &message).await;
/// # }
/// ```
pub async fn post(tx: &mut Transaction<'_, Postgres>, source: &Source, message: &Post) -> Result<Uuid, PostError> {
    let ids = post_all(tx, source, std::slice::from_ref(message)).await?;
    Ok(ids[0])
}

/// Posts many messages in one statement, in the given order. Returns their ids.
pub async fn post_all<'m>(
    tx: &mut Transaction<'_, Postgres>,
    source: &Source,
    messages: impl IntoIterator<Item = &'m Post>,
) -> Result<Vec<Uuid>, PostError> {
    insert(tx, source, messages).await
}

/// Posts many messages as their own transaction: all of them or none, in one round trip instead of three. The parameter
/// is a dedicated connection, so that it cannot be called within another transaction's work by mistake.
pub async fn post_alone<'m>(
    db: &mut ConnectionGuard<'_>,
    source: &Source,
    messages: impl IntoIterator<Item = &'m Post>,
) -> Result<Vec<Uuid>, PostError> {
    let ids = insert(db.connection(), source, messages).await?;
    db.wake_readers();
    Ok(ids)
}

async fn insert<'m>(
    db: &mut PgConnection,
    source: &Source,
    messages: impl IntoIterator<Item = &'m Post>,
) -> Result<Vec<Uuid>, PostError> {
    let messages = Vec::from_iter(messages);
    messages.iter().try_for_each(|message| message.check())?;
    let ids: Vec<Uuid> = messages.iter().map(|message| message.id.unwrap_or_else(Uuid::now_v7)).collect();
    // Bound once as JSON, so that PostgreSQL does not parse it again for every message.
    let trace = TraceContext::current();
    let explicit_headers: Vec<Option<String>> =
        messages.iter().map(|message| message.explicit_headers(trace)).collect();
    let column = |of: fn(&Post) -> Option<&str>| messages.iter().copied().map(of).collect::<Vec<_>>();
    let expiries: Vec<Option<DateTime<Utc>>> = messages.iter().map(|message| message.confidential_until).collect();
    let has_confidential = expiries.iter().any(Option::is_some);
    let query = if has_confidential {
        sqlx::query(sqlx::AssertSqlSafe(format!("with posted as ({INSERT} {RECORD_CONFIDENTIAL}")))
    } else {
        sqlx::query(INSERT)
    };
    let query = query
        .bind(source.as_str())
        .bind(headers_of(trace, None))
        .bind(&ids)
        .bind(column(|message| Some(message.tenant.as_str())))
        .bind(column(|message| Some(&message.topic)))
        .bind(column(|message| message.key.as_deref()))
        .bind(column(|message| message.aggregate_type.as_deref()))
        .bind(
            messages.iter().map(|message| message.aggregate_id.as_ref().map(AggregateId::to_json)).collect::<Vec<_>>(),
        )
        .bind(column(|message| Some(message.payload.get())))
        .bind(explicit_headers);
    let query = if has_confidential { query.bind(expiries) } else { query };
    query.execute(db).await?;
    Ok(ids)
}

const INSERT: &str = "
    insert into pillarbox.log
        (shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, payload)
    select pillarbox.shard_of(m.tenant, coalesce(m.key, m.message_id::text)), m.message_id, $1,
           m.tenant, m.topic, m.key, m.aggregate_type, m.aggregate_id::json,
           coalesce(m.headers::jsonb, $2), m.payload::json
    from unnest($3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[])
         with ordinality as m (message_id, tenant, topic, key, aggregate_type, aggregate_id, payload, headers, n)
    order by m.n";

/// The end of a statement that also records which of the messages are confidential. It is one statement, because
/// [`post_alone`] has no transaction around it, and only for batches with such a message.
const RECORD_CONFIDENTIAL: &str = "returning id, shard, at, message_id, tenant, key)
    insert into pillarbox.confidential (log_id, shard, at, message_id, tenant, key, until)
    select posted.id, posted.shard, posted.at, posted.message_id, posted.tenant, posted.key, expiring.until
    from posted join unnest($3::uuid[], $11::timestamptz[]) as expiring (message_id, until)
      on expiring.message_id = posted.message_id
    where expiring.until is not null";

fn headers_of(trace: Option<TraceContext>, confidential_until: Option<DateTime<Utc>>) -> Value {
    let mut headers = json!({});
    if let Some(trace) = trace {
        headers[TRACEPARENT] = trace.to_string().into();
    }
    if let Some(until) = confidential_until {
        headers[confidential::HEADER] = until.to_rfc3339_opts(SecondsFormat::Micros, true).into();
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(topic: &str) -> Post {
        Post::new(topic, RawValue::from_string("{}".to_owned()).unwrap())
    }

    #[test]
    fn headers_are_json() {
        let trace = TraceContext::start();
        let post = Post { trace: Some(trace), ..message("a") };
        let headers = |post: &Post| serde_json::from_str::<Value>(&post.explicit_headers(None).unwrap()).unwrap();
        assert_eq!(headers(&post), json!({"traceparent": trace.to_string()}));
        let id = Uuid::now_v7();
        let moved = Post { original_id: Some(id), ..post };
        assert_eq!(headers(&moved), json!({"traceparent": trace.to_string(), "original_id": id.to_string()}));
        assert_eq!(message("a").explicit_headers(Some(trace)), None);
    }

    #[test]
    fn topics_are_words_joined_by_dots() {
        for good in ["a", "order.created", "A_1.b_2.c"] {
            assert!(message(good).check().is_ok(), "{good}");
        }
        for bad in ["", ".", "a.", ".a", "a..b", "a b", "é", &"a".repeat(201)] {
            assert!(matches!(message(bad).check(), Err(PostError::Topic)), "{bad}");
        }
    }

    #[test]
    fn a_payload_that_is_too_large_is_rejected_with_advice() {
        let large = RawValue::from_string(format!("\"{}\"", "x".repeat(MESSAGE_BYTES_MAX))).unwrap();
        let error = Post::new("a", large).check().unwrap_err();
        assert!(error.to_string().contains("reference"), "{error}");
        assert!(message("a").with_key("").check().is_err());
        let typed = |chars| Post { aggregate_type: Some("x".repeat(chars)), ..message("a") };
        assert!(typed(100).check().is_ok() && matches!(typed(101).check(), Err(PostError::Aggregate)));
    }
}
