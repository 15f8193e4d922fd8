//! SQL for the schema `pillarbox_joins`. Every function takes a connection, joins the caller's transaction and makes no
//! decisions.

pub(crate) mod command_batch;
pub(crate) mod moderation;
pub(crate) mod queries;
pub(crate) mod reconciliation;

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::domain::{Ban, Event, Registration};

const EVENT_COLUMNS: &str = "event_id, owner_id, status, capacity, start_time, end_time, event_version,
    active_count, waitlist_count, next_seq, version, sweep_at, update_trace";
const REGISTRATION_COLUMNS: &str =
    "id, event_id, user_id, status::text as status, seq, created_at, updated_at, canceled_at, activated_at";
/// The numbers of active and waitlisted registrations of the event `e`, counted from the rows.
const ROW_COUNTS: &str = "
    (select count(*) from pillarbox_joins.joins as j
     where j.event_id = e.event_id and j.status = 'active')::int as active,
    (select count(*) from pillarbox_joins.joins as j
     where j.event_id = e.event_id and j.status = 'waitlisted')::int as waitlisted";

pub(crate) async fn find_event(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Event>> {
    let query = format!("select {EVENT_COLUMNS} from pillarbox_joins.event_capacity where event_id = $1");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).fetch_optional(db).await?;
    row.as_ref().map(event_of).transpose()
}

/// Locks the event whose sweep has been due for the longest time; None if no event is due. Skips locked events.
pub(crate) async fn lock_due_event(tx: &mut PgConnection, now: DateTime<Utc>) -> sqlx::Result<Option<Uuid>> {
    sqlx::query_scalar(
        "select event_id from pillarbox_joins.event_capacity where sweep_at <= $1
         order by sweep_at limit 1 for update skip locked",
    )
    .bind(now)
    .fetch_optional(tx)
    .await
}

/// Postpones the sweep of an event, unless it is already scheduled for a later time.
pub(crate) async fn postpone_sweep(db: &mut PgConnection, event_id: Uuid, until: DateTime<Utc>) -> sqlx::Result<()> {
    let update = "update pillarbox_joins.event_capacity set sweep_at = $2 where event_id = $1 and sweep_at < $2";
    sqlx::query(update).bind(event_id).bind(until).execute(db).await.map(drop)
}

fn event_of(row: &PgRow) -> sqlx::Result<Event> {
    Ok(Event {
        id: row.try_get("event_id")?,
        owner_id: row.try_get("owner_id")?,
        status: event_status(row)?,
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
        update_trace: row.try_get::<Option<&str>, _>("update_trace")?.and_then(|trace| trace.parse().ok()),
    })
}

fn registration_of(row: &PgRow) -> sqlx::Result<Registration> {
    let status: &str = row.try_get("status")?;
    Ok(Registration {
        id: row.try_get("id")?,
        event_id: row.try_get("event_id")?,
        user_id: row.try_get("user_id")?,
        status: status.parse::<JoinStatus>().map_err(|_| unknown_status(status))?,
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

fn event_status(row: &PgRow) -> sqlx::Result<EventStatus> {
    let status: &str = row.try_get("status")?;
    status.parse().map_err(|_| unknown_status(status))
}

/// The error for a status or an action that another version of this service has written.
fn unknown_status(status: &str) -> sqlx::Error {
    sqlx::Error::Decode(
        format!("unknown status or action {status}, written by another version of Pillarbox: run the newest one")
            .into(),
    )
}
