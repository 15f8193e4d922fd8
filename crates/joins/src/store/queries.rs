//! Reads for the HTTP API.

use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::REGISTRATION_COLUMNS;
use crate::domain::{Registration, RegistrationOfUser, WaitlistEntry};

/// Maximum number of registrations counted ahead of a waitlisted one. Bounds the cost of the query on long waitlists.
const AHEAD_MAX: i64 = 10_000;

/// The reason of the last kick or ban of the user of `mine`, if the registration is rejected.
const REASON: &str = "case when mine.status = 'rejected' then
    (select h.reason from pillarbox_joins.history as h
     where h.event_id = mine.event_id and h.user_id = mine.user_id and h.action in ('kicked', 'banned')
     order by h.version desc limit 1) end as reason";

/// A user's registration for an event, the number of waitlisted registrations ahead of it, up to [`AHEAD_MAX`], if it is
/// waitlisted, and the reason if it is rejected.
pub(crate) async fn find_registration(
    db: &mut PgConnection,
    event_id: Uuid,
    user_id: Uuid,
) -> sqlx::Result<Option<RegistrationOfUser>> {
    // The index of the waitlist is scanned up to the user's own sequence number.
    let query = format!(
        "select {REGISTRATION_COLUMNS}, {REASON}, case when mine.status = 'waitlisted' then
             (select count(*) from (select from pillarbox_joins.joins as w
              where w.event_id = mine.event_id and w.status = 'waitlisted' and w.seq < mine.seq
              limit {AHEAD_MAX}) as w) end as ahead
         from pillarbox_joins.joins as mine where event_id = $1 and user_id = $2"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(event_id).bind(user_id).fetch_optional(db).await
}

/// The active registrations of an event, by sequence number, after `after`.
pub(crate) async fn participants(
    db: &mut PgConnection,
    event_id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> sqlx::Result<Vec<Registration>> {
    // The status is a literal, so that the planner can use the partial index of that status.
    let query = format!(
        "select {REGISTRATION_COLUMNS} from pillarbox_joins.joins
         where event_id = $1 and joins.status = 'active' and seq > $2 order by seq limit $3"
    );
    let query = sqlx::query_as(AssertSqlSafe(query)).bind(event_id).bind(after.unwrap_or(0)).bind(i64::from(limit));
    query.fetch_all(db).await
}

/// The waitlisted registrations of an event, by sequence number, after `after`, each with the number of those ahead of it;
/// None if it is more than [`AHEAD_MAX`]. Those before the page are counted in the index of the waitlist, up to that number,
/// in the same statement: the positions belong to one snapshot.
pub(crate) async fn waitlist(
    db: &mut PgConnection,
    event_id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> sqlx::Result<Vec<WaitlistEntry>> {
    let query = format!(
        "select {REGISTRATION_COLUMNS},
                (select count(*) from (select from pillarbox_joins.joins as w
                 where w.event_id = $1 and w.status = 'waitlisted' and w.seq <= $2 limit {AHEAD_MAX} + 1) as w) as ahead
         from pillarbox_joins.joins
         where event_id = $1 and joins.status = 'waitlisted' and seq > $2 order by seq limit $3"
    );
    let query = sqlx::query_as(AssertSqlSafe(query)).bind(event_id).bind(after.unwrap_or(0)).bind(i64::from(limit));
    let mut entries: Vec<WaitlistEntry> = query.fetch_all(db).await?;
    for (entry, n) in entries.iter_mut().zip(0..) {
        entry.ahead = entry.ahead.map(|before_page| before_page + n).filter(|ahead| *ahead <= AHEAD_MAX);
    }
    Ok(entries)
}

/// The registrations of a user, newest first, before `before`.
pub(crate) async fn list_of_user(
    db: &mut PgConnection,
    user_id: Uuid,
    status: Option<JoinStatus>,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> sqlx::Result<Vec<RegistrationOfUser>> {
    let position = if before.is_some() {
        "and (created_at, id) < ($2, $3)"
    } else {
        "and $2::timestamptz is null and $3::uuid is null"
    };
    let query = format!(
        "select {REGISTRATION_COLUMNS}, {REASON}, null::bigint as ahead from pillarbox_joins.joins as mine
         where user_id = $1 {position} and ($4::text is null or mine.status::text = $4)
         order by created_at desc, id desc limit $5"
    );
    let (at, id) = before.unzip();
    sqlx::query_as(AssertSqlSafe(query))
        .bind(user_id)
        .bind(at)
        .bind(id)
        .bind(status.map(|status| status.into_str()))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await
}
