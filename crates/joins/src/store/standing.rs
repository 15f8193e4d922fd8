use contracts::events::EventStatus;
use contracts::joins::Count;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::unknown;
use crate::domain::Standing;

/// How these events stand, those that there are. Nothing is locked: an event's row and its joins change together, and one
/// statement sees both from before or both from after.
pub(crate) async fn standings(db: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<Vec<(Uuid, Standing)>> {
    let rows = sqlx::query(
        "select e.event_id, e.event_version, e.status, e.active_count, e.waitlist_count, e.version,
                (select count(*) from pillarbox_joins.joins as j
                 where j.event_id = e.event_id and j.status = 'active')::int as active,
                (select count(*) from pillarbox_joins.joins as j
                 where j.event_id = e.event_id and j.status = 'waitlisted')::int as waitlisted,
                (select h.at from pillarbox_joins.history as h
                 where h.event_id = e.event_id and h.version = e.version) as counted_at
         from pillarbox_joins.event_capacity as e where e.event_id = any($1)",
    )
    .bind(events)
    .fetch_all(db)
    .await?;
    rows.iter().map(standing).collect()
}

fn standing(row: &PgRow) -> sqlx::Result<(Uuid, Standing)> {
    let status: &str = row.try_get("status")?;
    let standing = Standing {
        event_version: row.try_get("event_version")?,
        status: EventStatus::named(status).ok_or_else(|| unknown(status))?,
        counts: Count {
            active: row.try_get("active_count")?,
            waitlisted: row.try_get("waitlist_count")?,
            version: row.try_get("version")?,
        },
        counted: (row.try_get("active")?, row.try_get("waitlisted")?),
        counted_at: row.try_get("counted_at")?,
    };
    Ok((row.try_get("event_id")?, standing))
}
