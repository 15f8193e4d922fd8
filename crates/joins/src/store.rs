//! SQL for the schema `pillarbox_joins`. Every function takes a connection, joins the caller's transaction and makes no
//! decisions.

pub(crate) mod command_batch;
pub(crate) mod moderation;
pub(crate) mod queries;
pub(crate) mod reconciliation;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::Event;

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
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).fetch_optional(db).await
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
