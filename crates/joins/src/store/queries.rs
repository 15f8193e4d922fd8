//! Reads for the HTTP API.

use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

use super::{REGISTRATION_COLUMNS, registration_of};
use crate::domain::Registration;

/// Maximum number of registrations counted ahead of a waitlisted one. Bounds the cost of the query on long waitlists.
const AHEAD_MAX: i64 = 10_000;

/// A user's registration for an event and, if it is waitlisted, the number of waitlisted registrations ahead of it, up
/// to [`AHEAD_MAX`].
pub(crate) async fn find_registration(
    db: &mut PgConnection,
    event_id: Uuid,
    user_id: Uuid,
) -> sqlx::Result<Option<(Registration, Option<i64>)>> {
    // The index of the waitlist is scanned up to the user's own sequence number.
    let query = format!(
        "select {REGISTRATION_COLUMNS}, case when status = 'waitlisted' then
             (select count(*) from (select from pillarbox_joins.joins as w
              where w.event_id = mine.event_id and w.status = 'waitlisted' and w.seq < mine.seq
              limit {AHEAD_MAX}) as w) end as ahead
         from pillarbox_joins.joins as mine where event_id = $1 and user_id = $2"
    );
    let row = sqlx::query(AssertSqlSafe(query)).bind(event_id).bind(user_id).fetch_optional(db).await?;
    row.map(|row| Ok((registration_of(&row)?, row.try_get("ahead")?))).transpose()
}

/// The registrations of an event with this status, by sequence number, after `after`.
pub(crate) async fn list_of_event(
    db: &mut PgConnection,
    event_id: Uuid,
    status: JoinStatus,
    (after, limit): (Option<i64>, u32),
) -> sqlx::Result<Vec<Registration>> {
    // The status is a literal, so that the planner can use the partial index of that status.
    let query = format!(
        "select {REGISTRATION_COLUMNS} from pillarbox_joins.joins
         where event_id = $1 and joins.status = '{}' and seq > $2 order by seq limit $3",
        status.into_str()
    );
    let rows = sqlx::query(AssertSqlSafe(query))
        .bind(event_id)
        .bind(after.unwrap_or(0))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await?;
    rows.iter().map(registration_of).collect()
}

/// The registrations of a user, newest first, before `before`.
pub(crate) async fn list_of_user(
    db: &mut PgConnection,
    user_id: Uuid,
    status: Option<JoinStatus>,
    (before, limit): (Option<(DateTime<Utc>, Uuid)>, u32),
) -> sqlx::Result<Vec<Registration>> {
    let position = if before.is_some() {
        "and (created_at, id) < ($2, $3)"
    } else {
        "and $2::timestamptz is null and $3::uuid is null"
    };
    let query = format!(
        "select {REGISTRATION_COLUMNS} from pillarbox_joins.joins
         where user_id = $1 {position} and ($4::text is null or joins.status::text = $4)
         order by created_at desc, id desc limit $5"
    );
    let (at, id) = before.unzip();
    let rows = sqlx::query(AssertSqlSafe(query))
        .bind(user_id)
        .bind(at)
        .bind(id)
        .bind(status.map(|status| status.into_str()))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await?;
    rows.iter().map(registration_of).collect()
}
