//! Looking at the log, for people: newest first, or one message.
//!
//! The log has no index for what people ask for: every index costs every post. It has (shard, id), and ids grow with time.
//! So a page looks through a bounded stretch of ids and says where the next one begins; and a time, or the time inside a
//! message's id, is turned into an id of the log by halving. What commits late may be missed by who walks through pages:
//! consumers read with [`crate::log`].

use chrono::{DateTime, Duration, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::filter::Filter;
use crate::log::{self, LogRef, Message};

/// A page looks through at most so many stretches of so many ids.
const STRETCH: i64 = 10_000;
const STRETCHES_MAX: u32 = 10;
/// Halving ends here: the rest is looked through.
const NEAR: i64 = 1_000;
/// Times and ids can disagree by this much: clocks differ, and are set.
pub(crate) const MARGIN: Duration = Duration::minutes(1);
/// A message is looked for around the time in its id, then further: one that a queue brought can come late.
const AROUND: [(Duration, Duration); 3] = [
    (Duration::seconds(-2), Duration::seconds(2)),
    (Duration::minutes(-5), Duration::minutes(5)),
    (Duration::minutes(5), Duration::days(1)),
];
const LOOKED_THROUGH_MAX: i64 = 1_000_000;

/// Which of them; None is any.
#[derive(Debug, Clone, Default)]
pub struct Which {
    /// This topic and what is below it.
    pub topic: Option<String>,
    pub tenant: Option<String>,
    pub source: Option<String>,
    /// What a reader with this filter takes.
    pub filter: Option<Filter>,
    pub from: Option<DateTime<Utc>>,
    pub to: Option<DateTime<Utc>>,
}

impl Which {
    /// Whether this message is one of them.
    pub fn means(&self, message: &Message) -> bool {
        let is_under = |topic: &String| {
            message.topic.strip_prefix(topic.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.topic.as_ref().is_none_or(is_under)
            && self.tenant.as_ref().is_none_or(|tenant| *tenant == message.tenant)
            && self.source.as_ref().is_none_or(|source| *source == message.source)
            && self.filter.as_ref().is_none_or(|filter| filter.takes(message))
            && self.from.is_none_or(|from| message.at >= from)
            && self.to.is_none_or(|to| message.at < to)
    }
}

/// A part of the log.
#[derive(Debug)]
pub struct Stretch {
    pub messages: Vec<Message>,
    /// Where the next one begins: what is below. None at the end. A stretch can be short, or empty, and have a next one.
    pub before: Option<i64>,
}

/// At most `limit` messages below `before`, newest first. It costs the same however large the log is.
pub async fn page(db: &mut PgConnection, which: &Which, before: Option<i64>, limit: u32) -> sqlx::Result<Stretch> {
    let mut before = match (before, which.to) {
        (Some(before), _) => before,
        (None, Some(to)) => around(db, None, to + MARGIN).await?.1,
        (None, None) => i64::MAX,
    };
    let mut messages = Vec::new();
    for _ in 0..STRETCHES_MAX {
        let Some((newest, at)) = newest_below(db, None, before).await? else {
            return Ok(Stretch { messages, before: None });
        };
        if which.from.is_some_and(|from| at < from - MARGIN) {
            return Ok(Stretch { messages, before: None });
        }
        let low = newest + 1 - STRETCH;
        let room = i64::from(limit) - messages.len() as i64;
        messages.extend(between(db, which, low, newest + 1, room).await?);
        if messages.len() >= limit as usize {
            let before = messages.last().map(|last| last.id);
            return Ok(Stretch { messages, before });
        }
        before = low;
    }
    Ok(Stretch { messages, before: Some(before) })
}

/// The message with this id, if the log still has it.
pub async fn find(db: &mut PgConnection, message_id: Uuid) -> sqlx::Result<Option<Message>> {
    let Some(made_at) = made_at(message_id) else { return Ok(None) };
    for (from, to) in AROUND {
        let (low, high) = (around(db, None, made_at + from).await?.0, around(db, None, made_at + to).await?.1);
        let row = sqlx::query(
            "select found.* from pillarbox.shards() as slot (shard) cross join lateral (
                 select * from pillarbox.log
                 where log.shard = slot.shard and id >= $1 and id < $2 and message_id = $3 limit 1
             ) found limit 1",
        )
        .bind(low)
        .bind(high.min(low + LOOKED_THROUGH_MAX))
        .bind(message_id)
        .fetch_optional(&mut *db)
        .await?;
        if let Some(row) = row {
            return log::message(&row).map(Some);
        }
    }
    Ok(None)
}

/// What a message is called.
#[derive(Debug, Clone)]
pub struct Name {
    pub place: LogRef,
    pub message_id: Uuid,
    pub topic: String,
}

/// The names of the messages at these places, in no order, without what they say; those that the log no longer has are
/// missing.
pub async fn names(db: &mut PgConnection, places: &[LogRef]) -> sqlx::Result<Vec<Name>> {
    let rows = sqlx::query(
        "select found.* from unnest($1::smallint[], $2::bigint[], $3::timestamptz[]) as place (shard, id, at)
         cross join lateral (
             select shard, id, at, message_id, topic from pillarbox.log
             where log.shard = place.shard and log.id = place.id and log.at = place.at
         ) found",
    )
    .bind(places.iter().map(|place| place.shard).collect::<Vec<_>>())
    .bind(places.iter().map(|place| place.id).collect::<Vec<_>>())
    .bind(places.iter().map(|place| place.at).collect::<Vec<_>>())
    .fetch_all(db)
    .await?;
    let name = |row: &PgRow| {
        let place = LogRef { shard: row.try_get("shard")?, id: row.try_get("id")?, at: row.try_get("at")? };
        Ok(Name { place, message_id: row.try_get("message_id")?, topic: row.try_get("topic")? })
    };
    rows.iter().map(name).collect()
}

/// The time in an id of version 7.
pub fn made_at(id: Uuid) -> Option<DateTime<Utc>> {
    let milliseconds = (id.as_u128() >> 80) as i64;
    (id.get_version_num() == 7).then(|| DateTime::from_timestamp_millis(milliseconds)).flatten()
}

async fn between(db: &mut PgConnection, which: &Which, low: i64, high: i64, limit: i64) -> sqlx::Result<Vec<Message>> {
    let rows = sqlx::query(
        "select found.* from pillarbox.shards() as slot (shard) cross join lateral (
             select * from pillarbox.log
             where log.shard = slot.shard and id >= $1 and id < $2
               and ($3::text is null or topic = $3 or starts_with(topic, $3 || '.'))
               and ($4::text is null or tenant = $4) and ($5::text is null or source = $5)
               and ($6::timestamptz is null or at >= $6) and ($7::timestamptz is null or at < $7)
               and ($9::text is null or pillarbox.subject(source, topic, aggregate_type) ~ $9)
               and ($10::text is null or pillarbox.subject(source, topic, aggregate_type) !~ $10)
             order by id desc limit $8
         ) found order by found.id desc limit $8",
    )
    .bind(low)
    .bind(high)
    .bind(&which.topic)
    .bind(&which.tenant)
    .bind(&which.source)
    .bind(which.from)
    .bind(which.to)
    .bind(limit)
    .bind(which.filter.as_ref().map(Filter::wants))
    .bind(which.filter.as_ref().and_then(Filter::leaves))
    .fetch_all(db)
    .await?;
    rows.iter().map(log::message).collect()
}

/// An id of this shard: what is below was posted before this time. It lies close to it.
pub(crate) async fn first_since(db: &mut PgConnection, shard: i16, time: DateTime<Utc>) -> sqlx::Result<i64> {
    Ok(around(db, Some(shard), time - MARGIN).await?.0)
}

/// An id of this shard: what is at or above was posted after this time. None if the log does not go on behind it.
pub(crate) async fn first_after(db: &mut PgConnection, shard: i16, time: DateTime<Utc>) -> sqlx::Result<Option<i64>> {
    match newest_below(db, Some(shard), i64::MAX).await? {
        Some((_, at)) if at > time + MARGIN => Ok(Some(around(db, Some(shard), time + MARGIN).await?.1)),
        Some(_) | None => Ok(None),
    }
}

/// Two ids that lie close together around a time, of one shard or of all: what is below the first was posted before it,
/// what is at or above the second after it.
async fn around(db: &mut PgConnection, shard: Option<i16>, time: DateTime<Utc>) -> sqlx::Result<(i64, i64)> {
    let (mut low, mut high) = match newest_below(db, shard, i64::MAX).await? {
        Some((newest, _)) => (0, newest + 1),
        None => (0, 0),
    };
    while high - low > NEAR {
        let middle = low + (high - low) / 2;
        match newest_below(db, shard, middle).await? {
            Some((id, at)) if at > time => high = id,
            Some(_) | None => low = middle,
        }
    }
    Ok((low, high))
}

async fn newest_below(
    db: &mut PgConnection,
    shard: Option<i16>,
    id: i64,
) -> sqlx::Result<Option<(i64, DateTime<Utc>)>> {
    let row = sqlx::query(
        "select newest.id, newest.at from pillarbox.shards() as slot (shard) cross join lateral (
             select id, at from pillarbox.log
             where log.shard = slot.shard and id < $1 order by id desc limit 1
         ) newest where $2::smallint is null or slot.shard = $2 order by newest.id desc limit 1",
    )
    .bind(id)
    .bind(shard)
    .fetch_optional(db)
    .await?;
    row.map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).transpose()
}
