//! What people look at.

use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

use super::{ENTRY_COLUMNS, entry_of};
use crate::domain::Entry;

/// Who waits behind so many is told no more than that: to count them all costs more with every one.
const AHEAD_MAX: i64 = 10_000;

/// Someone's place, and how many of the waitlist are before them, up to [`AHEAD_MAX`], if they are on it.
pub(crate) async fn place(
    db: &mut PgConnection,
    event_id: Uuid,
    user_id: Uuid,
) -> sqlx::Result<Option<(Entry, Option<i64>)>> {
    // Counted in the index of the waitlist, up to their own place.
    let query = format!(
        "select {ENTRY_COLUMNS}, case when status = 'waitlisted' then
             (select count(*) from (select from pillarbox_joins.joins as w
              where w.event_id = mine.event_id and w.status = 'waitlisted' and w.seq < mine.seq
              limit {AHEAD_MAX}) as w) end as ahead
         from pillarbox_joins.joins as mine where event_id = $1 and user_id = $2"
    );
    let row = sqlx::query(AssertSqlSafe(query)).bind(event_id).bind(user_id).fetch_optional(db).await?;
    row.map(|row| Ok((entry_of(&row)?, row.try_get("ahead")?))).transpose()
}

/// Those of an event who have this status, in their order, behind `after`.
pub(crate) async fn of_event(
    db: &mut PgConnection,
    event_id: Uuid,
    status: JoinStatus,
    (after, limit): (Option<i64>, u32),
) -> sqlx::Result<Vec<Entry>> {
    // The status is in the text, so that its own index is used.
    let query = format!(
        "select {ENTRY_COLUMNS} from pillarbox_joins.joins
         where event_id = $1 and joins.status = '{}' and seq > $2 order by seq limit $3",
        status.as_str()
    );
    let rows = sqlx::query(AssertSqlSafe(query))
        .bind(event_id)
        .bind(after.unwrap_or(0))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await?;
    rows.iter().map(entry_of).collect()
}

/// Somebody's, newest first, behind `before`.
pub(crate) async fn of_user(
    db: &mut PgConnection,
    user_id: Uuid,
    status: Option<JoinStatus>,
    (before, limit): (Option<(DateTime<Utc>, Uuid)>, u32),
) -> sqlx::Result<Vec<Entry>> {
    let behind = if before.is_some() {
        "and (created_at, id) < ($2, $3)"
    } else {
        "and $2::timestamptz is null and $3::uuid is null"
    };
    let query = format!(
        "select {ENTRY_COLUMNS} from pillarbox_joins.joins
         where user_id = $1 {behind} and ($4::text is null or joins.status::text = $4)
         order by created_at desc, id desc limit $5"
    );
    let (at, id) = before.unzip();
    let rows = sqlx::query(AssertSqlSafe(query))
        .bind(user_id)
        .bind(at)
        .bind(id)
        .bind(status.map(JoinStatus::as_str))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await?;
    rows.iter().map(entry_of).collect()
}
