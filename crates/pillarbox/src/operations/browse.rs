//! Browsing the log: pages of messages, newest first, and single messages.
//!
//! The log has no index for these queries, because every index slows down every post. It has one on (shard, id), and
//! ids grow with time. So a page scans a bounded range of ids and returns where the next page begins; and a time, or
//! the time inside a message's id, is translated into an id of the log ([`crate::log::time_search`]). Pages can miss
//! late commits; consumers read with [`crate::log::Reader`], which does not.

use chrono::{DateTime, Duration, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::log::time_search::{self, MARGIN};
use crate::log::{Filter, LogRef, Message, created_at};

/// A page scans at most this many ranges of this many ids.
const RANGE_IDS: i64 = 10_000;
const RANGES_MAX: u32 = 10;
/// Where a message is searched, relative to the time in its id. A message from a queue can be posted much later than
/// its id was created.
const SEARCH_RANGES: [(Duration, Duration); 3] = [
    (Duration::seconds(-2), Duration::seconds(2)),
    (Duration::minutes(-5), Duration::minutes(5)),
    (Duration::minutes(5), Duration::days(1)),
];
/// The most ids that are scanned in one search range.
const SEARCH_IDS_MAX: i64 = 1_000_000;

/// Selects messages. None in a field means any.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// This topic and all topics below it.
    pub topic: Option<String>,
    /// Only messages of this tenant.
    pub tenant: Option<String>,
    /// Only messages of this source.
    pub source: Option<String>,
    /// The messages that a consumer with this filter reads.
    pub filter: Option<Filter>,
    /// Not the messages that this consumer has passed when it had another filter, which did not match them.
    pub consumer: Option<String>,
    /// Posted at this time or later.
    pub from: Option<DateTime<Utc>>,
    /// Posted before this time.
    pub to: Option<DateTime<Utc>>,
}

impl Selection {
    /// Whether the selection contains this message. What its consumer has read with another filter is not checked.
    pub fn matches(&self, message: &Message) -> bool {
        let is_under = |topic: &String| {
            message.topic.strip_prefix(topic.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.topic.as_ref().is_none_or(is_under)
            && self.tenant.as_ref().is_none_or(|tenant| *tenant == message.tenant)
            && self.source.as_ref().is_none_or(|source| *source == message.source)
            && self.filter.as_ref().is_none_or(|filter| filter.matches(message))
            && self.from.is_none_or(|from| message.at >= from)
            && self.to.is_none_or(|to| message.at < to)
    }
}

/// A page of the log.
#[derive(Debug)]
pub struct LogPage {
    /// The messages, newest first.
    pub messages: Vec<Message>,
    /// The next page has the messages below this id; None at the end. Even a short or empty page can have a next page.
    pub before: Option<i64>,
}

/// Returns at most `limit` messages with an id below `before`, newest first, with empty headers and the payload `null`: a page
/// of payloads can have many megabytes. The cost does not depend on the size of the log.
pub async fn page(
    db: &mut PgConnection,
    selection: &Selection,
    before: Option<i64>,
    limit: u32,
) -> sqlx::Result<LogPage> {
    let mut before = match (before, selection.to) {
        (Some(before), _) => before,
        (None, Some(to)) => time_search::around(db, None, to + MARGIN).await?.1,
        (None, None) => i64::MAX,
    };
    let mut messages = Vec::new();
    for _ in 0..RANGES_MAX {
        let Some((newest, at)) = time_search::newest_below(db, None, before).await? else {
            return Ok(LogPage { messages, before: None });
        };
        if selection.from.is_some_and(|from| at < from - MARGIN) {
            return Ok(LogPage { messages, before: None });
        }
        let low = newest + 1 - RANGE_IDS;
        let remaining = i64::from(limit) - messages.len() as i64;
        messages.extend(between(db, selection, low, newest + 1, remaining).await?);
        if messages.len() >= limit as usize {
            let before = messages.last().map(|last| last.id);
            return Ok(LogPage { messages, before });
        }
        before = low;
    }
    Ok(LogPage { messages, before: Some(before) })
}

/// Returns the message with this id; None if the log does not have it any more.
pub async fn find(db: &mut PgConnection, message_id: Uuid) -> sqlx::Result<Option<Message>> {
    // An id that its producer has chosen may contain no time, or another one.
    let query = "select at from pillarbox.chosen_id where message_id = $1";
    let posted_at = sqlx::query_scalar(query).bind(message_id).fetch_optional(&mut *db).await?;
    match posted_at.or_else(|| created_at(message_id)) {
        Some(time) => find_near(db, message_id, time).await,
        None => Ok(None),
    }
}

/// Returns the message with this id if it was posted at about this time, or up to a day later.
async fn find_near(db: &mut PgConnection, message_id: Uuid, time: DateTime<Utc>) -> sqlx::Result<Option<Message>> {
    for (from, to) in SEARCH_RANGES {
        let (low, high) =
            (time_search::around(db, None, time + from).await?.0, time_search::around(db, None, time + to).await?.1);
        let row = sqlx::query(
            "select found.* from pillarbox.shards() as slot (shard) cross join lateral (
                 select * from pillarbox.log
                 where log.shard = slot.shard and id >= $1 and id < $2 and message_id = $3 limit 1
             ) found limit 1",
        )
        .bind(low)
        .bind(high.min(low + SEARCH_IDS_MAX))
        .bind(message_id)
        .fetch_optional(&mut *db)
        .await?;
        if let Some(row) = row {
            return Message::from_log_row(&row).map(Some);
        }
    }
    Ok(None)
}

/// The identity of a message without its content.
#[derive(Debug, Clone)]
pub struct MessageName {
    /// Where it is in the log.
    pub log_ref: LogRef,
    /// Its public id.
    pub message_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its key.
    pub key: Option<String>,
}

/// Loads the names of the referenced messages, in no particular order. Messages that retention has dropped are missing.
pub async fn load_names(db: &mut PgConnection, refs: &[LogRef]) -> sqlx::Result<Vec<MessageName>> {
    type Found = (i16, i64, DateTime<Utc>, Uuid, String, Option<String>);
    let rows: Vec<Found> = sqlx::query_as(
        "select found.* from unnest($1::smallint[], $2::bigint[], $3::timestamptz[]) as log_ref (shard, id, at)
         cross join lateral (
             select shard, id, at, message_id, topic, key from pillarbox.log
             where log.shard = log_ref.shard and log.id = log_ref.id and log.at = log_ref.at
         ) found",
    )
    .bind(refs.iter().map(|log_ref| log_ref.shard).collect::<Vec<_>>())
    .bind(refs.iter().map(|log_ref| log_ref.id).collect::<Vec<_>>())
    .bind(refs.iter().map(|log_ref| log_ref.at).collect::<Vec<_>>())
    .fetch_all(db)
    .await?;
    let names = rows.into_iter().map(|(shard, id, at, message_id, topic, key)| MessageName {
        log_ref: LogRef { shard, id, at },
        message_id,
        topic,
        key,
    });
    Ok(names.collect())
}

/// Whether a consumer that has passed the message had a filter that matches it then. Its current filter is not checked.
pub async fn was_selected(db: &mut PgConnection, consumer: &str, message: &Message) -> sqlx::Result<bool> {
    sqlx::query_scalar("select pillarbox.was_selected($1, $2, $3, $4, $5, $6)")
        .bind(consumer)
        .bind(&message.source)
        .bind(&message.topic)
        .bind(&message.aggregate_type)
        .bind(message.shard)
        .bind(message.at)
        .fetch_one(db)
        .await
}

/// Returns the newest `limit` selected messages with an id from `low` to below `high`.
async fn between(
    db: &mut PgConnection,
    selection: &Selection,
    low: i64,
    high: i64,
    limit: i64,
) -> sqlx::Result<Vec<Message>> {
    let rows = sqlx::query(
        "select found.* from pillarbox.shards() as slot (shard) cross join lateral (
             select id, shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, at,
                    '{}'::json as headers, 'null'::json as payload
             from pillarbox.log
             where log.shard = slot.shard and id >= $1 and id < $2
               and ($3::text is null or topic = $3 or starts_with(topic, $3 || '.'))
               and ($4::text is null or tenant = $4) and ($5::text is null or source = $5)
               and ($6::timestamptz is null or at >= $6) and ($7::timestamptz is null or at < $7)
               and ($9::text is null or pillarbox.subject(source, topic, aggregate_type) ~ $9)
               and ($10::text is null or pillarbox.subject(source, topic, aggregate_type) !~ $10)
               and ($11::text is null or pillarbox.was_selected($11, source, topic, aggregate_type, log.shard, at))
             order by id desc limit $8
         ) found order by found.id desc limit $8",
    )
    .bind(low)
    .bind(high)
    .bind(&selection.topic)
    .bind(&selection.tenant)
    .bind(&selection.source)
    .bind(selection.from)
    .bind(selection.to)
    .bind(limit)
    .bind(selection.filter.as_ref().map(Filter::included))
    .bind(selection.filter.as_ref().and_then(Filter::excluded))
    .bind(&selection.consumer)
    .fetch_all(db)
    .await?;
    rows.iter().map(Message::from_log_row).collect()
}
