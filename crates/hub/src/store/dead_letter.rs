use chrono::{DateTime, Utc};
use kit::auth::Tenant;
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::domain::Reason;

#[derive(Debug, Clone)]
pub(crate) struct DeadLetter {
    pub(crate) id: Uuid,
    pub(crate) subscriber: Uuid,
    pub(crate) lane: Option<String>,
    /// Its id and its type; None: the log no longer had it.
    pub(crate) event: Option<(Uuid, String)>,
    pub(crate) reason: Reason,
    pub(crate) detail: String,
    pub(crate) attempts: i16,
    pub(crate) moved_to_dlq_at: DateTime<Utc>,
    pub(crate) retried: Option<(String, DateTime<Utc>)>,
}

/// As they were when it died.
#[derive(Debug)]
pub(crate) struct Snapshots {
    pub(crate) event: Option<Box<RawValue>>,
    pub(crate) subscriber: Box<RawValue>,
}

/// Which of a tenant's; None is any.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Which {
    pub(crate) subscriber: Option<Uuid>,
    /// This type and what is below it.
    pub(crate) event_type: Option<String>,
    pub(crate) reason: Option<Reason>,
    pub(crate) from: Option<DateTime<Utc>>,
    pub(crate) to: Option<DateTime<Utc>>,
    pub(crate) retried: Option<bool>,
}

const COLUMNS: &str = "id, subscriber, lane, event_id, event_type, reason, detail, attempts, moved_to_dlq_at,
    manual_retry_by, manual_retry_at";
const CONDITIONS: &str = "dead_letter.tenant = $1 and ($2::uuid is null or dead_letter.subscriber = $2)
    and ($3::text is null or event_type = $3 or starts_with(event_type, $3 || '.'))
    and ($4::text is null or reason = $4)
    and ($5::timestamptz is null or moved_to_dlq_at >= $5) and ($6::timestamptz is null or moved_to_dlq_at < $6)
    and ($7::boolean is null or (manual_retry_at is not null) = $7)";

macro_rules! which {
    ($query:expr, $tenant:expr, $which:expr) => {
        sqlx::query(sqlx::AssertSqlSafe($query))
            .bind($tenant.as_str())
            .bind($which.subscriber)
            .bind(&$which.event_type)
            .bind($which.reason.map(Reason::as_str))
            .bind($which.from)
            .bind($which.to)
            .bind($which.retried)
    };
}

/// Newest first, behind `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    tenant: &Tenant,
    which: &Which,
    (before, limit): (Option<Uuid>, u32),
) -> sqlx::Result<Vec<DeadLetter>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.dead_letter
         where {CONDITIONS} and ($8::uuid is null or id < $8) order by id desc limit $9"
    );
    let rows = which!(query, tenant, which).bind(before).bind(i64::from(limit)).fetch_all(db).await?;
    rows.iter().map(dead_letter).collect()
}

pub(crate) async fn find(
    db: &mut PgConnection,
    tenant: &Tenant,
    id: Uuid,
) -> sqlx::Result<Option<(DeadLetter, Snapshots)>> {
    let query = format!(
        "select {COLUMNS}, event_snapshot, subscriber_snapshot from pillarbox_hub.dead_letter
         where id = $1 and tenant = $2"
    );
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str()).fetch_optional(db).await?;
    let Some(row) = row else { return Ok(None) };
    let raw = |column| row.try_get::<Option<Json<Box<RawValue>>>, _>(column).map(|raw| raw.map(|Json(text)| text));
    let snapshots =
        Snapshots { event: raw("event_snapshot")?, subscriber: raw("subscriber_snapshot")?.unwrap_or_default() };
    Ok(Some((dead_letter(&row)?, snapshots)))
}

/// Who retries it next waits for this transaction.
pub(crate) async fn lock(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<DeadLetter>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.dead_letter where id = $1 and tenant = $2 for update");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str()).fetch_optional(db).await?;
    row.as_ref().map(dead_letter).transpose()
}

/// The oldest behind `after` that were not retried yet and have a subscriber and an event, locked. What somebody else is retrying at
/// this moment is left to them.
pub(crate) async fn lock_many(
    db: &mut PgConnection,
    tenant: &Tenant,
    which: &Which,
    (after, limit): (Option<Uuid>, i64),
) -> sqlx::Result<Vec<(Uuid, Uuid)>> {
    let query = format!(
        "select dead_letter.id, dead_letter.subscriber from pillarbox_hub.dead_letter
         where {CONDITIONS} and ($8::uuid is null or dead_letter.id > $8) and manual_retry_at is null
           and event_id is not null
           and exists (select from pillarbox_hub.subscriber where subscriber.id = dead_letter.subscriber)
         order by dead_letter.id limit $9 for update of dead_letter skip locked"
    );
    let rows = which!(query, tenant, which).bind(after).bind(limit).fetch_all(db).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

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

fn dead_letter(row: &PgRow) -> sqlx::Result<DeadLetter> {
    let reason: &str = row.try_get("reason")?;
    let event_id: Option<Uuid> = row.try_get("event_id")?;
    let by: Option<String> = row.try_get("manual_retry_by")?;
    Ok(DeadLetter {
        id: row.try_get("id")?,
        subscriber: row.try_get("subscriber")?,
        lane: row.try_get("lane")?,
        event: event_id.zip(row.try_get("event_type")?),
        reason: Reason::named(reason).ok_or_else(|| sqlx::Error::Decode(format!("no reason: {reason}").into()))?,
        detail: row.try_get("detail")?,
        attempts: row.try_get("attempts")?,
        moved_to_dlq_at: row.try_get("moved_to_dlq_at")?,
        retried: by.zip(row.try_get("manual_retry_at")?),
    })
}
