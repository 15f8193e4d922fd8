//! Reads for reconciliation.

use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::ROW_COUNTS;
use crate::domain::KnownEvent;

/// The known ones of these events. No lock is needed: an event's row and its registrations change in the same
/// transaction, and one statement sees a consistent snapshot of both.
pub(crate) async fn load_known_events(db: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<Vec<KnownEvent>> {
    let query = format!(
        "select e.event_id, e.event_version, e.status, e.active_count, e.waitlist_count, e.version,
                {ROW_COUNTS},
                (select h.at from pillarbox_joins.history as h
                 where h.event_id = e.event_id and h.version = e.version) as counts_changed_at
         from pillarbox_joins.event_capacity as e where e.event_id = any($1)"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(events).fetch_all(db).await
}
