//! SQL for dead letters as operators list, retry and discard them.

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use serde_json::value::RawValue;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::deliveries::attempt_result::Attempt;
use crate::deliveries::domain::Reason;
use crate::deliveries::message::EventSnapshot;

/// A message that was given up.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct DeadLetter {
    pub(crate) id: Uuid,
    pub(crate) subscriber: Uuid,
    /// The name of the subscriber when the message was given up.
    pub(crate) subscriber_name: String,
    pub(crate) lane: Option<String>,
    /// The replay that has created the message.
    pub(crate) replay: Option<Uuid>,
    /// None: the log no longer had the event when the message was given up. The same applies to its type.
    pub(crate) event_id: Option<Uuid>,
    pub(crate) event_type: Option<String>,
    pub(crate) ordering_key: Option<String>,
    #[sqlx(rename = "log_at")]
    pub(crate) received_at: DateTime<Utc>,
    #[sqlx(try_from = "&'a str")]
    pub(crate) reason: Reason,
    pub(crate) detail: String,
    pub(crate) attempts: i16,
    pub(crate) moved_to_dlq_at: DateTime<Utc>,
    /// Who requested a retry.
    pub(crate) manual_retry_by: Option<String>,
    pub(crate) manual_retry_at: Option<DateTime<Utc>>,
}

/// A dead letter with its event and its subscriber as they were when the message was given up.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct DeadLetterWithSnapshots {
    #[sqlx(flatten)]
    pub(crate) dead_letter: DeadLetter,
    #[sqlx(json(nullable))]
    pub(crate) event_snapshot: Option<EventSnapshot>,
    #[sqlx(json)]
    pub(crate) subscriber_snapshot: Box<RawValue>,
}

/// Selects dead letters of a tenant. None matches any.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct DeadLetterFilter {
    pub(crate) subscriber: Option<Uuid>,
    /// This type and all types below it.
    pub(crate) event_type: Option<String>,
    pub(crate) reason: Option<Reason>,
    pub(crate) from: Option<DateTime<Utc>>,
    pub(crate) to: Option<DateTime<Utc>>,
    pub(crate) retried: Option<bool>,
}

const COLUMNS: &str =
    "id, subscriber, coalesce(subscriber_snapshot ->> 'name', '') as subscriber_name, lane, replay, event_id, event_type, ordering_key, log_at, reason, detail, attempts,
    moved_to_dlq_at, manual_retry_by, manual_retry_at";
/// The columns of a [`Discarded`]. A deleted subscriber has no lanes.
const DISCARDED: &str = "id, subscriber, n, exists (
    select from pillarbox_hub.lane
    where lane.subscriber = dead_letter.subscriber and lane.head = dead_letter.n and lane.next_at is null) as blocks_lane";
const CONDITIONS: &str = "dead_letter.tenant = $1 and ($2::uuid is null or dead_letter.subscriber = $2)
    and ($3::text is null or event_type = $3 or starts_with(event_type, $3 || '.'))
    and ($4::text is null or reason = $4)
    and ($5::timestamptz is null or moved_to_dlq_at >= $5) and ($6::timestamptz is null or moved_to_dlq_at < $6)
    and ($7::boolean is null or (manual_retry_at is not null) = $7)";

/// A query whose first parameters are those of [`CONDITIONS`].
macro_rules! filtered_query {
    ($query:expr, $tenant:expr, $filter:expr) => {
        sqlx::query_as(sqlx::AssertSqlSafe($query))
            .bind($tenant.as_str())
            .bind($filter.subscriber)
            .bind(&$filter.event_type)
            .bind($filter.reason.map(Reason::as_str))
            .bind($filter.from)
            .bind($filter.to)
            .bind($filter.retried)
    };
}

/// Returns dead letters newest first, those with ids below `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    tenant: &Tenant,
    filter: &DeadLetterFilter,
    before: Option<Uuid>,
    limit: u32,
) -> sqlx::Result<Vec<DeadLetter>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.dead_letter
         where {CONDITIONS} and ($8::uuid is null or id < $8) order by id desc limit $9"
    );
    filtered_query!(query, tenant, filter).bind(before).bind(i64::from(limit)).fetch_all(db).await
}

/// Returns a dead letter with its snapshots.
pub(crate) async fn find(
    db: &mut PgConnection,
    tenant: &Tenant,
    id: Uuid,
) -> sqlx::Result<Option<DeadLetterWithSnapshots>> {
    let query = format!(
        "select {COLUMNS}, event_snapshot, subscriber_snapshot from pillarbox_hub.dead_letter
         where id = $1 and tenant = $2"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str()).fetch_optional(db).await
}

/// Returns a dead letter and locks its row until the end of the transaction.
pub(crate) async fn lock(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<DeadLetter>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.dead_letter where id = $1 and tenant = $2 for update");
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str()).fetch_optional(db).await
}

/// A dead letter to retry.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub(crate) struct Retryable {
    pub(crate) id: Uuid,
    pub(crate) subscriber: Uuid,
}

/// Locks the oldest dead letters after `after` that can be retried: not retried yet, and with a subscriber and an
/// event. Rows that another transaction has locked are skipped.
pub(crate) async fn lock_many(
    db: &mut PgConnection,
    tenant: &Tenant,
    filter: &DeadLetterFilter,
    after: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<Retryable>> {
    let query = format!(
        "select dead_letter.id, dead_letter.subscriber from pillarbox_hub.dead_letter
         where {CONDITIONS} and ($8::uuid is null or dead_letter.id > $8) and manual_retry_at is null
           and event_id is not null
           and exists (select from pillarbox_hub.subscriber where subscriber.id = dead_letter.subscriber)
         order by dead_letter.id limit $9 for update of dead_letter skip locked"
    );
    filtered_query!(query, tenant, filter).bind(after).bind(limit).fetch_all(db).await
}

/// A dead letter to discard.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub(crate) struct Discarded {
    pub(crate) id: Uuid,
    pub(crate) subscriber: Uuid,
    /// The number of the message.
    pub(crate) n: i64,
    /// The later messages of its lane wait until it is retried or discarded.
    pub(crate) blocks_lane: bool,
}

/// Deletes a dead letter unless a retry was requested. None: it does not exist, or was retried.
pub(crate) async fn delete(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<Discarded>> {
    let query = format!(
        "delete from pillarbox_hub.dead_letter where id = $1 and tenant = $2 and manual_retry_at is null
         returning {DISCARDED}"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str()).fetch_optional(db).await
}

/// Deletes the oldest matching dead letters for which no retry was requested. Rows that another transaction has locked are
/// skipped.
pub(crate) async fn delete_many(
    db: &mut PgConnection,
    tenant: &Tenant,
    filter: &DeadLetterFilter,
    after: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<Discarded>> {
    let query = format!(
        "delete from pillarbox_hub.dead_letter where id in (
             select id from pillarbox_hub.dead_letter
             where {CONDITIONS} and ($8::uuid is null or id > $8) and manual_retry_at is null
             order by id limit $9 for update skip locked)
         returning {DISCARDED}"
    );
    filtered_query!(query, tenant, filter).bind(after).bind(limit).fetch_all(db).await
}

/// Records who requested the retry of these dead letters.
pub(crate) async fn mark_retried(
    db: &mut PgConnection,
    ids: &[Uuid],
    by: &str,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query("update pillarbox_hub.dead_letter set manual_retry_by = $2, manual_retry_at = $3 where id = any($1)")
        .bind(ids)
        .bind(by)
        .bind(now)
        .execute(db)
        .await
        .map(drop)
}

/// Marks the dead letters as retried whose event a replay has sent to the subscriber again: it arrived, or became a new dead
/// letter. A dead letter that blocks its lane stays open, because the lane waits for the decision of an operator.
pub(crate) async fn close_replayed(
    db: &mut PgConnection,
    attempts: &[Attempt],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let mut replayed = Vec::new();
    for attempt in attempts.iter().filter(|attempt| attempt.outcome.is_final()) {
        replayed.extend(attempt.replay.map(|replay| (attempt.subscriber, attempt.n, replay)));
    }
    if replayed.is_empty() {
        return Ok(());
    }
    let mut subscribers: Vec<Uuid> = replayed.iter().map(|(subscriber, ..)| *subscriber).collect();
    subscribers.sort_unstable();
    subscribers.dedup();
    // Subscribers without open dead letters are left out first, so that a large replay rarely searches for its messages. The
    // limit makes it a search for each message: a join may scan all messages instead.
    sqlx::query(
        "with open as materialized (
             select subscriber from unnest($5::uuid[]) as given (subscriber)
             where exists (select from pillarbox_hub.dead_letter
                           where dead_letter.subscriber = given.subscriber and dead_letter.manual_retry_at is null)
         ), sent as materialized (
             select * from unnest($1::uuid[], $2::bigint[], $3::uuid[]) as sent (subscriber, n, replay)
             where subscriber in (select open.subscriber from open)
         )
         update pillarbox_hub.dead_letter as dead
         set manual_retry_at = $4,
             manual_retry_by = coalesce((select requested_by from pillarbox_hub.replay where id = sent.replay), 'replay')
         from sent cross join lateral (
             select log_id from pillarbox_hub.message where subscriber = sent.subscriber and n = sent.n limit 1
         ) message
         where dead.log_id = message.log_id and dead.subscriber = sent.subscriber and dead.n < sent.n
           and dead.manual_retry_at is null
           and not exists (select from pillarbox_hub.lane
                           where lane.subscriber = dead.subscriber and lane.head = dead.n and lane.next_at is null)",
    )
    .bind(replayed.iter().map(|(subscriber, ..)| *subscriber).collect::<Vec<_>>())
    .bind(replayed.iter().map(|(_, n, _)| *n).collect::<Vec<_>>())
    .bind(replayed.iter().map(|(.., replay)| *replay).collect::<Vec<_>>())
    .bind(now)
    .bind(subscribers)
    .execute(db)
    .await
    .map(drop)
}
