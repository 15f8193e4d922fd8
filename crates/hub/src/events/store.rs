//! Queries about hub messages and their attempts, for the HTTP API.

pub(crate) mod deferred;
pub(crate) mod rejected;
pub(crate) mod retention_hold;

use std::collections::HashSet;

use chrono::{DateTime, Duration, Utc};
use pillarbox::log::LogRef;
use pillarbox::log::Tenant;
use sqlx::{FromRow, PgConnection, Row};
use uuid::Uuid;

use crate::deliveries::domain::Outcome;
use crate::rows::LogColumns;

/// Allowance for clock skew between replicas. A message and its attempts are younger than its event; relative to each other
/// they have no order, because maintenance may have moved the message to a later day.
const CLOCK_SKEW: Duration = Duration::minutes(1);
/// Messages that a page examines at most, if it leaves some of them out.
const EXAMINED_MAX: i64 = 2_000;
/// The same for the messages of all subscribers of a tenant, each of which may have as many.
const EXAMINED_OF_TENANT_MAX: i64 = 500;
/// A tenant with more subscribers is not searched for each of them, if its messages are found among the newest of all.
const SEARCHED_SUBSCRIBERS_MAX: i64 = 50;
/// The numbers of messages that are read for such a tenant: if the first ones are too few, the second ones.
const WINDOWS: [i64; 2] = [2_000, 20_000];
/// Attempts that a list contains at most: the newest.
const ATTEMPTS_MAX: i64 = 1_000;

/// Selects events. None matches any.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventFilter {
    /// This type and all types below it.
    pub(crate) event_type: Option<String>,
    pub(crate) from: Option<DateTime<Utc>>,
    pub(crate) to: Option<DateTime<Utc>>,
}

/// A hub message and its progress.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct Message {
    pub(crate) n: i64,
    pub(crate) at: DateTime<Utc>,
    pub(crate) subscriber: Uuid,
    /// The name of the subscriber.
    pub(crate) name: String,
    pub(crate) lane: Option<String>,
    pub(crate) seq: Option<i64>,
    #[sqlx(flatten, try_from = "LogColumns")]
    pub(crate) log_ref: LogRef,
    /// The dead letter that this message retries.
    #[sqlx(rename = "dead_letter")]
    pub(crate) retry_of: Option<Uuid>,
    /// The replay that has created it.
    pub(crate) replay: Option<Uuid>,
    #[sqlx(flatten)]
    pub(crate) progress: Progress,
}

/// How far the delivery of a message is, by its last attempt.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct Progress {
    #[sqlx(try_from = "&'a str")]
    pub(crate) outcome: Outcome,
    pub(crate) attempts: i16,
    pub(crate) last_attempt_at: Option<DateTime<Utc>>,
    pub(crate) last_status: Option<i16>,
    pub(crate) last_error: Option<String>,
    pub(crate) last_detail: Option<String>,
    pub(crate) next_attempt_at: Option<DateTime<Utc>>,
    /// It is a dead letter, and the later messages of its lane wait until an operator retries or dead-letters it.
    pub(crate) blocks_lane: bool,
    /// The dead letter of the message, if it can still be retried or discarded.
    pub(crate) open_dead_letter: Option<Uuid>,
}

#[derive(Debug, Clone, FromRow)]
pub(crate) struct Attempt {
    pub(crate) at: DateTime<Utc>,
    pub(crate) attempt: i16,
    #[sqlx(try_from = "&'a str")]
    pub(crate) outcome: Outcome,
    pub(crate) status: Option<i16>,
    pub(crate) latency_ms: i32,
    pub(crate) error: Option<String>,
    pub(crate) detail: Option<String>,
    pub(crate) excerpt: Option<String>,
    /// The dead letter that the message of this attempt retries.
    #[sqlx(rename = "dead_letter")]
    pub(crate) retry_of: Option<Uuid>,
    /// The replay that has created the message of this attempt.
    pub(crate) replay: Option<Uuid>,
}

/// A subscriber that an event matched by its type, but that got no message; `outcome` says why.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct Skipped {
    #[sqlx(rename = "id")]
    pub(crate) subscriber: Uuid,
    pub(crate) name: String,
    #[sqlx(try_from = "&'a str")]
    pub(crate) outcome: Outcome,
}

/// The outcome of the last attempt. A dead letter that an operator retries at the head of its lane is pending.
const OUTCOME: &str =
    "case when last.outcome is null or (last.outcome = 'dead' and waiting.manual_retry) then 'pending'
    else last.outcome end";
/// All columns except the outcome, of messages with the alias `found`.
const COLUMNS: &str =
    "found.n, found.at, found.subscriber, found.lane, found.seq, found.log_shard, found.log_id, found.log_at,
    found.dead_letter, found.replay, coalesce(last.attempt, retried.attempts, 0::smallint) as attempts,
    last.at as last_attempt_at, last.status as last_status, last.error as last_error, last.detail as last_detail,
    case when last.outcome = 'failed' or waiting.manual_retry then waiting.next_at end as next_attempt_at,
    waiting.head is not null and waiting.next_at is null as blocks_lane,
    case when last.outcome = 'dead' then given_up.id end as open_dead_letter";
const PROGRESS: &str = "
    left join lateral (
        select * from pillarbox_hub.attempt
        where attempt.subscriber = found.subscriber and attempt.n = found.n and attempt.at >= found.log_at - $1::interval
        order by attempt.at desc, attempt.attempt desc limit 1
    ) last on true
    left join pillarbox_hub.lane waiting on waiting.subscriber = found.subscriber and waiting.head = found.n
    left join pillarbox_hub.dead_letter retried on retried.id = found.dead_letter
    left join pillarbox_hub.dead_letter given_up
        on given_up.subscriber = found.subscriber and given_up.n = found.n and given_up.manual_retry_at is null";
/// Whether a message is the newest one of its event for its subscriber. Each repeat is a retry or a replay; with this condition
/// they are found by the index `message_repeated`.
const IS_NEWEST: &str = "not exists (
    select from pillarbox_hub.message repeated
    where repeated.subscriber = found.subscriber and repeated.log_id = found.log_id and repeated.n > found.n
      and (repeated.dead_letter is not null or repeated.replay is not null)
      and repeated.at >= found.log_at - $1::interval)";

/// The newest message of an event for each of a tenant's subscribers, or for one of them.
pub(crate) async fn of_event(
    db: &mut PgConnection,
    tenant: &Tenant,
    log_ref: LogRef,
    subscriber: Option<Uuid>,
) -> sqlx::Result<Vec<Message>> {
    // Materialized, so that the index on log_id is used: an index on subscribers would visit all their messages.
    sqlx::query_as(sqlx::AssertSqlSafe(format!(
        "with found as materialized (
             select distinct on (subscriber) * from pillarbox_hub.message
             where log_id = $2 and at >= $3::timestamptz - $1::interval
             order by subscriber, n desc
         )
         select {COLUMNS}, {OUTCOME} as outcome, subscriber.name
         from found join pillarbox_hub.subscriber on subscriber.id = found.subscriber and subscriber.tenant = $5 {PROGRESS}
         where $4::uuid is null or found.subscriber = $4
         order by found.subscriber"
    )))
    .bind(CLOCK_SKEW)
    .bind(log_ref.id)
    .bind(log_ref.at)
    .bind(subscriber)
    .bind(tenant.as_str())
    .fetch_all(db)
    .await
}

/// The subscribers of a tenant that an event matched by its type, but that got no message.
pub(crate) async fn skipped(db: &mut PgConnection, tenant: &Tenant, log_ref: LogRef) -> sqlx::Result<Vec<Skipped>> {
    sqlx::query_as(
        "with skipped as materialized (
             select filtered, inactive from pillarbox_hub.skipped where log_id = $1 and at >= $2::timestamptz - $3::interval
         ), named as (
             select unnest(filtered) as id, 'filtered' as outcome from skipped
             union select unnest(inactive), 'inactive' from skipped
         )
         select subscriber.id, subscriber.name, named.outcome
         from named join pillarbox_hub.subscriber on subscriber.id = named.id and subscriber.tenant = $4
         order by subscriber.id",
    )
    .bind(log_ref.id)
    .bind(log_ref.at)
    .bind(CLOCK_SKEW)
    .bind(tenant.as_str())
    .fetch_all(db)
    .await
}

/// Those of these events, by their ids in the log, that matched a subscriber or a stream: fan-out has created a message, has recorded that a
/// subscriber got none, or has added the event to a stream. Also subscribers and streams that were deleted since.
pub(crate) async fn matched(db: &mut PgConnection, events: &[LogRef]) -> sqlx::Result<HashSet<i64>> {
    // One search for each event, which ends with the first row: an event may have messages for thousands of subscribers.
    let found: Vec<i64> = sqlx::query_scalar(
        "select event.id from unnest($1::bigint[], $2::timestamptz[]) as event (id, at)
         where exists (select from pillarbox_hub.message where log_id = event.id and message.at >= event.at - $3::interval)
            or exists (select from pillarbox_hub.skipped where log_id = event.id and skipped.at >= event.at - $3::interval)
            or exists (select from pillarbox_hub.stream_message where log_id = event.id and stream_message.at = event.at)",
    )
    .bind(events.iter().map(|event| event.id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.at).collect::<Vec<_>>())
    .bind(CLOCK_SKEW)
    .fetch_all(db)
    .await?;
    Ok(found.into_iter().collect())
}

/// Whose messages are listed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MessageScope<'a> {
    Subscriber(Uuid),
    /// All subscribers of this tenant.
    Tenant(&'a Tenant),
}

/// The newest messages of a subscriber below a number.
const OF_SUBSCRIBER: &str = "select * from pillarbox_hub.message
    where subscriber = $2::text::uuid and ($3::bigint is null or n < $3) order by n desc limit $4";
/// The newest messages of all subscribers of a tenant between two numbers. The cost does not depend on the number of
/// subscribers: all messages with these numbers are read.
const OF_TENANT_IN_WINDOW: &str = "select message.* from pillarbox_hub.message
    join pillarbox_hub.subscriber on subscriber.id = message.subscriber and subscriber.tenant = $2::text
    where message.n >= $7::bigint and message.n < $3::bigint order by message.n desc limit $4";
/// The newest messages of all subscribers of a tenant below a number. One search per subscriber finds its newest message. The
/// newest messages of all belong to as many subscribers at most, so only those whose newest message is highest are read on.
const OF_TENANT: &str = "select message.* from (
        select active.id, one.n
        from (
            select subscriber.id, newest.n from pillarbox_hub.subscriber
            cross join lateral (
                select n from pillarbox_hub.message
                where message.subscriber = subscriber.id and n < coalesce($3::bigint, 9223372036854775807) order by n desc limit 1
            ) newest
            where tenant = $2::text order by newest.n desc limit $4
        ) active
        cross join lateral (
            select n from pillarbox_hub.message
            where message.subscriber = active.id and n < coalesce($3::bigint, 9223372036854775807) order by n desc limit $4
        ) one
        order by one.n desc limit $4
    ) chosen
    -- The limit makes it a search for each message. A join may scan all messages instead.
    cross join lateral (
        select * from pillarbox_hub.message where message.subscriber = chosen.id and message.n = chosen.n limit 1
    ) message";

/// A page of messages, newest first.
#[derive(Debug)]
pub(crate) struct MessagePage {
    pub(crate) messages: Vec<Message>,
    /// Where the next page starts; None on the last page. A page can have fewer messages than the limit, even none, and
    /// still have a next page.
    pub(crate) before: Option<i64>,
}

/// At most `limit` messages below `before`, with this outcome. Of the messages of one event for one subscriber only the newest
/// is in the list.
pub(crate) async fn list(
    db: &mut PgConnection,
    scope: MessageScope<'_>,
    wanted: Option<Outcome>,
    before: Option<i64>,
    limit: u32,
) -> sqlx::Result<MessagePage> {
    let mut unexamined = match scope {
        MessageScope::Subscriber(_) => EXAMINED_MAX,
        MessageScope::Tenant(_) => EXAMINED_OF_TENANT_MAX,
    };
    let limit = i64::from(limit);
    let mut page = MessagePage { messages: Vec::new(), before };
    // Without a filter, messages that were repeated are all that is left out, so the first part is usually the whole page.
    let mut part_max = if wanted.is_some() { unexamined } else { limit };
    loop {
        let missing = limit - page.messages.len() as i64;
        let part = examine(db, scope, wanted, page.before, part_max, missing).await?;
        page.messages.extend(part.messages);
        unexamined -= part.examined;
        page.before = match page.messages.last() {
            Some(last) if page.messages.len() as i64 == limit => Some(last.n),
            Some(_) | None if part.examined == part_max => part.lowest,
            Some(_) | None => None,
        };
        if page.before.is_none() || page.messages.len() as i64 == limit || unexamined <= 0 {
            return Ok(page);
        }
        part_max = unexamined;
    }
}

/// The messages that a part of a list has, of those that were examined for it.
#[derive(Default)]
struct ExaminedPart {
    messages: Vec<Message>,
    examined: i64,
    /// The lowest number of the examined messages.
    lowest: Option<i64>,
}

async fn examine(
    db: &mut PgConnection,
    scope: MessageScope<'_>,
    wanted: Option<Outcome>,
    before: Option<i64>,
    examined_max: i64,
    limit: i64,
) -> sqlx::Result<ExaminedPart> {
    let window = match scope {
        MessageScope::Subscriber(_) => None,
        MessageScope::Tenant(tenant) => find_window(db, tenant, before, examined_max).await?,
    };
    let (found, owner) = match (scope, window) {
        (MessageScope::Subscriber(subscriber), _) => (OF_SUBSCRIBER, subscriber.to_string()),
        (MessageScope::Tenant(tenant), Some(_)) => (OF_TENANT_IN_WINDOW, tenant.as_str().to_owned()),
        (MessageScope::Tenant(tenant), None) => (OF_TENANT, tenant.as_str().to_owned()),
    };
    let (first, before) = window.map_or((None, before), |(first, end)| (Some(first), Some(end)));
    let query = format!(
        "with found as materialized (
             {found}
         ), page as (
             select {COLUMNS}, {OUTCOME} as outcome, subscriber.name
             from found join pillarbox_hub.subscriber on subscriber.id = found.subscriber {PROGRESS}
             where {IS_NEWEST} and ($5::text is null or {OUTCOME} = $5)
             order by found.n desc limit $6
         )
         select page.*, seen.examined, seen.lowest
         from (select count(*) as examined, min(n) as lowest from found) seen left join page on true
         order by page.n desc"
    );
    let mut query = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(CLOCK_SKEW)
        .bind(owner)
        .bind(before)
        .bind(examined_max)
        .bind(wanted.map(Outcome::as_str))
        .bind(limit);
    if let Some(first) = first {
        query = query.bind(first);
    }
    let rows = query.fetch_all(db).await?;
    let Some(first) = rows.first() else { return Ok(ExaminedPart::default()) };
    let (examined, lowest) = (first.try_get("examined")?, first.try_get("lowest")?);
    // Without a message on the page, there is one row with the columns of what was examined only.
    let has_messages = first.try_get::<Option<i64>, _>("n")?.is_some();
    let messages = rows.iter().filter(|_| has_messages).map(Message::from_row).collect::<sqlx::Result<_>>()?;
    Ok(ExaminedPart { messages, examined, lowest })
}

/// The numbers, from the first to the one after the last, among which a tenant with many subscribers has `wanted` messages
/// below `before`. None: it has few subscribers, or too few of the newest messages; then each subscriber is searched.
async fn find_window(
    db: &mut PgConnection,
    tenant: &Tenant,
    before: Option<i64>,
    wanted: i64,
) -> sqlx::Result<Option<(i64, i64)>> {
    let query =
        "select (select count(*) from (select from pillarbox_hub.subscriber where tenant = $1 limit $2) as counted),
                        (select coalesce(max(n_to), 0) + 1 from pillarbox_hub.fanout_batch)";
    let query = sqlx::query_as(query).bind(tenant.as_str()).bind(SEARCHED_SUBSCRIBERS_MAX + 1);
    let (subscribers, newest): (i64, i64) = query.fetch_one(&mut *db).await?;
    if subscribers <= SEARCHED_SUBSCRIBERS_MAX {
        return Ok(None);
    }
    let end = before.unwrap_or(newest);
    for width in WINDOWS {
        let query = "select count(*) from (
                         select from pillarbox_hub.message
                         join pillarbox_hub.subscriber on subscriber.id = message.subscriber and subscriber.tenant = $1
                         where message.n >= $2 and message.n < $3 limit $4) as counted";
        let query = sqlx::query_scalar(query).bind(tenant.as_str()).bind(end - width).bind(end).bind(wanted);
        let found: i64 = query.fetch_one(&mut *db).await?;
        if found == wanted {
            return Ok(Some((end - width, end)));
        }
    }
    Ok(None)
}

/// The attempts to send an event to a subscriber, in their order, including those of retried dead letters and replays.
pub(crate) async fn attempts(db: &mut PgConnection, subscriber: Uuid, log_ref: LogRef) -> sqlx::Result<Vec<Attempt>> {
    let mut newest: Vec<Attempt> = sqlx::query_as(
        "with found as materialized (
             select n, log_at, subscriber, dead_letter, replay from pillarbox_hub.message
             where log_id = $2 and at >= $3::timestamptz - $1::interval
         )
         select attempt.*, found.dead_letter, found.replay from found join lateral (
             select * from pillarbox_hub.attempt
             where attempt.subscriber = $4 and attempt.n = found.n and attempt.at >= found.log_at - $1::interval
         ) attempt on true
         where found.subscriber = $4
         order by attempt.at desc, attempt.n desc, attempt.attempt desc limit $5",
    )
    .bind(CLOCK_SKEW)
    .bind(log_ref.id)
    .bind(log_ref.at)
    .bind(subscriber)
    .bind(ATTEMPTS_MAX)
    .fetch_all(db)
    .await?;
    newest.reverse();
    Ok(newest)
}
