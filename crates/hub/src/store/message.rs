use chrono::{DateTime, Duration, Utc};
use kit::auth::Tenant;
use mailbox::log::LogRef;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::domain::Outcome;

/// A message is made and tried after its event, though it may have been carried on to a later day than that of its first
/// attempts; clocks differ by less than this.
const MARGIN: Duration = Duration::minutes(1);
/// A page that is asked for one outcome looks through at most so many messages.
const LOOKED_THROUGH_MAX: i64 = 2_000;
const ATTEMPTS_MAX: i64 = 1_000;

/// A message and what has become of it so far.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) n: i64,
    pub(crate) at: DateTime<Utc>,
    pub(crate) subscriber: Uuid,
    /// Of the subscriber.
    pub(crate) name: String,
    pub(crate) lane: Option<String>,
    pub(crate) seq: Option<i64>,
    pub(crate) place: LogRef,
    /// It is sent again on request: this one's.
    pub(crate) retry_of: Option<Uuid>,
    pub(crate) progress: Progress,
}

/// What the last attempt says.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    pub(crate) outcome: Outcome,
    pub(crate) attempts: i16,
    pub(crate) last_attempt_at: Option<DateTime<Utc>>,
    pub(crate) last_status: Option<i16>,
    pub(crate) last_error: Option<String>,
    pub(crate) next_attempt_at: Option<DateTime<Utc>>,
    /// It died, and those behind it wait until it is retried or given up.
    pub(crate) blocks_lane: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) at: DateTime<Utc>,
    pub(crate) attempt: i16,
    pub(crate) outcome: Outcome,
    pub(crate) status: Option<i16>,
    pub(crate) latency_ms: i32,
    pub(crate) error: Option<String>,
    pub(crate) detail: Option<String>,
    pub(crate) excerpt: Option<String>,
}

/// Who an event did not go to, and why.
#[derive(Debug, Clone)]
pub(crate) struct Unsent {
    pub(crate) subscriber: Uuid,
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
}

/// The last attempt's; but one that died and is to be sent again all the same waits.
const OUTCOME: &str = "case when last.outcome is null or (last.outcome = 'dead' and waiting.again) then 'pending'
    else last.outcome end";
/// Of messages called `made`, but for the outcome.
const COLUMNS: &str = "made.n, made.at, made.subscriber, made.lane, made.seq, made.log_shard, made.log_id, made.log_at,
    made.dead_letter, coalesce(last.attempt, 0::smallint) as attempts,
    last.at as last_attempt_at, last.status as last_status, last.error as last_error, last.detail as last_detail,
    case when last.outcome = 'failed' or waiting.again then waiting.next_at end as next_attempt_at,
    waiting.head is not null and waiting.next_at is null as blocks_lane";
const PROGRESS: &str = "
    left join lateral (
        select * from pillarbox_hub.attempt
        where attempt.subscriber = made.subscriber and attempt.n = made.n and attempt.at >= made.log_at - $1::interval
        order by attempt.at desc, attempt.attempt desc limit 1
    ) last on true
    left join pillarbox_hub.lane waiting on waiting.subscriber = made.subscriber and waiting.head = made.n";

/// The newest message of an event for each of a tenant's subscribers, or for one of them.
pub(crate) async fn of_event(
    db: &mut PgConnection,
    tenant: &Tenant,
    place: LogRef,
    subscriber: Option<Uuid>,
) -> sqlx::Result<Vec<Message>> {
    // By the place in the log first, and on its own: an index of subscribers leads through all that they ever got.
    let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
        "with made as materialized (
             select distinct on (subscriber) * from pillarbox_hub.message
             where log_id = $2 and at >= $3::timestamptz - $1::interval
             order by subscriber, n desc
         )
         select {COLUMNS}, {OUTCOME} as outcome, subscriber.name
         from made join pillarbox_hub.subscriber on subscriber.id = made.subscriber and subscriber.tenant = $5 {PROGRESS}
         where $4::uuid is null or made.subscriber = $4
         order by made.subscriber"
    )))
    .bind(MARGIN)
    .bind(place.id)
    .bind(place.at)
    .bind(subscriber)
    .bind(tenant.as_str())
    .fetch_all(db)
    .await?;
    rows.iter().map(message).collect()
}

/// Which of a tenant's subscribers an event did not go to.
pub(crate) async fn unsent(db: &mut PgConnection, tenant: &Tenant, place: LogRef) -> sqlx::Result<Vec<Unsent>> {
    let rows = sqlx::query(
        "with unsent as materialized (
             select filtered, inactive from pillarbox_hub.unsent where log_id = $1 and at >= $2::timestamptz - $3::interval
         ), named as (
             select unnest(filtered) as id, 'filtered' as outcome from unsent
             union select unnest(inactive), 'inactive' from unsent
         )
         select subscriber.id, subscriber.name, named.outcome
         from named join pillarbox_hub.subscriber on subscriber.id = named.id and subscriber.tenant = $4
         order by subscriber.id",
    )
    .bind(place.id)
    .bind(place.at)
    .bind(MARGIN)
    .bind(tenant.as_str())
    .fetch_all(db)
    .await?;
    let unsent = |row: &PgRow| {
        Ok(Unsent {
            subscriber: row.try_get("id")?,
            name: row.try_get("name")?,
            outcome: outcome(row.try_get("outcome")?)?,
        })
    };
    rows.iter().map(unsent).collect()
}

/// A stretch of a subscriber's messages, newest first.
#[derive(Debug)]
pub(crate) struct Stretch {
    pub(crate) messages: Vec<Message>,
    /// Where the next one begins; None at the end. A stretch can be short, or empty, and have a next one.
    pub(crate) before: Option<i64>,
}

/// At most `limit` messages of a subscriber below `before`, with this outcome.
pub(crate) async fn list(
    db: &mut PgConnection,
    subscriber: Uuid,
    wanted: Option<Outcome>,
    (before, limit): (Option<i64>, u32),
) -> sqlx::Result<Stretch> {
    let look_at = if wanted.is_some() { LOOKED_THROUGH_MAX } else { i64::from(limit) };
    let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
        "with made as materialized (
             select * from pillarbox_hub.message where subscriber = $2 and ($3::bigint is null or n < $3)
             order by n desc limit $4
         ), found as (
             select {COLUMNS}, {OUTCOME} as outcome, subscriber.name
             from made join pillarbox_hub.subscriber on subscriber.id = made.subscriber {PROGRESS}
             where $5::text is null or {OUTCOME} = $5
             order by made.n desc limit $6
         )
         select found.*, seen.looked_at, seen.lowest
         from (select count(*) as looked_at, min(n) as lowest from made) seen left join found on true
         order by found.n desc"
    )))
    .bind(MARGIN)
    .bind(subscriber)
    .bind(before)
    .bind(look_at)
    .bind(wanted.map(Outcome::as_str))
    .bind(i64::from(limit))
    .fetch_all(db)
    .await?;
    let found = |row: &&PgRow| row.try_get::<Option<i64>, _>("n").ok().flatten().is_some();
    let messages = rows.iter().filter(found).map(message).collect::<sqlx::Result<Vec<_>>>()?;
    let before = match (messages.last(), rows.first()) {
        (Some(last), _) if messages.len() == limit as usize => Some(last.n),
        (_, Some(row)) if row.try_get::<i64, _>("looked_at")? == look_at => row.try_get("lowest")?,
        (_, Some(_) | None) => None,
    };
    Ok(Stretch { messages, before })
}

/// Every attempt to send an event to a subscriber, also of those messages that were sent again, in their order.
pub(crate) async fn attempts(db: &mut PgConnection, subscriber: Uuid, place: LogRef) -> sqlx::Result<Vec<Attempt>> {
    let rows = sqlx::query(
        "with made as materialized (
             select n, log_at, subscriber from pillarbox_hub.message where log_id = $2 and at >= $3::timestamptz - $1::interval
         )
         select attempt.* from made join lateral (
             select * from pillarbox_hub.attempt
             where attempt.subscriber = $4 and attempt.n = made.n and attempt.at >= made.log_at - $1::interval
         ) attempt on true
         where made.subscriber = $4
         order by attempt.at desc, attempt.n desc, attempt.attempt desc limit $5",
    )
    .bind(MARGIN)
    .bind(place.id)
    .bind(place.at)
    .bind(subscriber)
    .bind(ATTEMPTS_MAX)
    .fetch_all(db)
    .await?;
    rows.iter().rev().map(attempt).collect()
}

fn message(row: &PgRow) -> sqlx::Result<Message> {
    let (error, detail): (Option<String>, Option<String>) = (row.try_get("last_error")?, row.try_get("last_detail")?);
    let last_status: Option<i16> = row.try_get("last_status")?;
    let progress = Progress {
        outcome: outcome(row.try_get("outcome")?)?,
        attempts: row.try_get("attempts")?,
        last_attempt_at: row.try_get("last_attempt_at")?,
        last_status,
        last_error: match (last_status, error, detail) {
            // In the words of its dead letter, should it die.
            (Some(status), Some(_), None) => Some(format!("answered {status}")),
            (_, Some(error), Some(detail)) => Some(format!("{error}: {detail}")),
            (_, error, detail) => error.or(detail),
        },
        next_attempt_at: row.try_get("next_attempt_at")?,
        blocks_lane: row.try_get("blocks_lane")?,
    };
    Ok(Message {
        n: row.try_get("n")?,
        at: row.try_get("at")?,
        subscriber: row.try_get("subscriber")?,
        name: row.try_get("name")?,
        lane: row.try_get("lane")?,
        seq: row.try_get("seq")?,
        place: LogRef { shard: row.try_get("log_shard")?, id: row.try_get("log_id")?, at: row.try_get("log_at")? },
        retry_of: row.try_get("dead_letter")?,
        progress,
    })
}

fn attempt(row: &PgRow) -> sqlx::Result<Attempt> {
    Ok(Attempt {
        at: row.try_get("at")?,
        attempt: row.try_get("attempt")?,
        outcome: outcome(row.try_get("outcome")?)?,
        status: row.try_get("status")?,
        latency_ms: row.try_get("latency_ms")?,
        error: row.try_get("error")?,
        detail: row.try_get("detail")?,
        excerpt: row.try_get("excerpt")?,
    })
}

fn outcome(name: &str) -> sqlx::Result<Outcome> {
    Outcome::named(name).ok_or_else(|| sqlx::Error::Decode(format!("no outcome: {name}").into()))
}
