//! Reads for reconciliation.

use contracts::joins::Count;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

use super::{ROW_COUNTS, event_status};
use crate::domain::KnownEvent;

/// The known ones of these events. No lock is needed: an event's row and its registrations change in the same
/// transaction, and one statement sees a consistent snapshot of both.
pub(crate) async fn load_known_events(db: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<Vec<(Uuid, KnownEvent)>> {
    let query = format!(
        "select e.event_id, e.event_version, e.status, e.active_count, e.waitlist_count, e.version,
                {ROW_COUNTS},
                (select h.at from pillarbox_joins.history as h
                 where h.event_id = e.event_id and h.version = e.version) as counts_changed_at
         from pillarbox_joins.event_capacity as e where e.event_id = any($1)"
    );
    let rows = sqlx::query(AssertSqlSafe(query)).bind(events).fetch_all(db).await?;
    rows.iter().map(known_event_of).collect()
}

fn known_event_of(row: &PgRow) -> sqlx::Result<(Uuid, KnownEvent)> {
    let known = KnownEvent {
        event_version: row.try_get("event_version")?,
        status: event_status(row)?,
        counts: Count {
            active: row.try_get("active_count")?,
            waitlisted: row.try_get("waitlist_count")?,
            version: row.try_get("version")?,
        },
        row_counts: (row.try_get("active")?, row.try_get("waitlisted")?),
        counts_changed_at: row.try_get("counts_changed_at")?,
    };
    Ok((row.try_get("event_id")?, known))
}
