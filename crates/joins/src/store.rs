//! SQL. Every function joins the caller's connection or transaction; none decides.

pub(crate) mod list;
pub(crate) mod roster;
pub(crate) mod standing;

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::domain::{Ban, Entry, Event};

const EVENT_COLUMNS: &str = "event_id, owner_id, status, capacity, start_time, end_time, event_version,
    active_count, waitlist_count, next_seq, version, sweep_at, news_trace";
const ENTRY_COLUMNS: &str =
    "id, event_id, user_id, status::text as status, seq, created_at, updated_at, canceled_at, activated_at";

pub(crate) async fn event(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Event>> {
    let query = format!("select {EVENT_COLUMNS} from pillarbox_joins.event_capacity where event_id = $1");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).fetch_optional(db).await?;
    row.as_ref().map(event_of).transpose()
}

/// An event that something is due for, held; one that somebody holds is passed over.
pub(crate) async fn due(tx: &mut PgConnection, now: DateTime<Utc>) -> sqlx::Result<Option<Uuid>> {
    sqlx::query_scalar(
        "select event_id from pillarbox_joins.event_capacity where sweep_at <= $1
         order by sweep_at limit 1 for update skip locked",
    )
    .bind(now)
    .fetch_optional(tx)
    .await
}

/// What is due for an event is to wait.
pub(crate) async fn put_off(db: &mut PgConnection, event_id: Uuid, until: DateTime<Utc>) -> sqlx::Result<()> {
    let update = "update pillarbox_joins.event_capacity set sweep_at = $2 where event_id = $1 and sweep_at < $2";
    sqlx::query(update).bind(event_id).bind(until).execute(db).await.map(drop)
}

fn event_of(row: &PgRow) -> sqlx::Result<Event> {
    let status: &str = row.try_get("status")?;
    Ok(Event {
        id: row.try_get("event_id")?,
        owner_id: row.try_get("owner_id")?,
        status: EventStatus::named(status).ok_or_else(|| unknown(status))?,
        capacity: row.try_get("capacity")?,
        start_time: row.try_get("start_time")?,
        end_time: row.try_get("end_time")?,
        event_version: row.try_get("event_version")?,
        counts: Count {
            active: row.try_get("active_count")?,
            waitlisted: row.try_get("waitlist_count")?,
            version: row.try_get("version")?,
        },
        next_seq: row.try_get("next_seq")?,
        sweep_at: row.try_get("sweep_at")?,
        news_trace: row.try_get::<Option<&str>, _>("news_trace")?.and_then(|trace| trace.parse().ok()),
    })
}

fn entry_of(row: &PgRow) -> sqlx::Result<Entry> {
    let status: &str = row.try_get("status")?;
    Ok(Entry {
        id: row.try_get("id")?,
        event_id: row.try_get("event_id")?,
        user_id: row.try_get("user_id")?,
        status: JoinStatus::named(status).ok_or_else(|| unknown(status))?,
        seq: row.try_get("seq")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
        canceled_at: row.try_get("canceled_at")?,
        activated_at: row.try_get("activated_at")?,
    })
}

fn ban_of(row: &PgRow) -> sqlx::Result<Ban> {
    Ok(Ban {
        id: row.try_get("id")?,
        event_id: row.try_get("event_id")?,
        user_id: row.try_get("user_id")?,
        reason: row.try_get("reason")?,
        banned_by: row.try_get("banned_by")?,
        expires_at: row.try_get("expires_at")?,
        created_at: row.try_get("created_at")?,
    })
}

/// A status that this version did not write.
fn unknown(status: &str) -> sqlx::Error {
    sqlx::Error::Decode(format!("status {status}").into())
}
