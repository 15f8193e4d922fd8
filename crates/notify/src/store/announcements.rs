//! Business events with many recipients, whose recipients are notified in steps.

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use crate::domain::business_event::{BusinessEvent, EventColumns};
use crate::domain::participants::{Addressees, AddresseesColumns, Previous};

/// A business event that is being announced.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct Announcement {
    pub(crate) business_event: Uuid,
    #[sqlx(flatten, try_from = "AddresseesColumns")]
    pub(crate) addressees: Addressees,
    /// The last user who has been notified.
    pub(crate) last_user: Option<Uuid>,
    /// The attempts that have failed since the last step.
    pub(crate) attempts: i32,
    /// The state that the participants know, if it is an announcement of a change that has not begun.
    #[sqlx(json(nullable))]
    pub(crate) previous: Option<Previous>,
    /// Whether there are participants who know a later state than `previous`.
    pub(crate) joined_since: bool,
}

/// An announcement as operators see it.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct AnnouncementRecord {
    pub(crate) id: i64,
    pub(crate) business_event: Uuid,
    /// The event or the aggregate.
    pub(crate) subject: String,
    pub(crate) last_user: Option<Uuid>,
    /// None: given up.
    pub(crate) due_at: Option<DateTime<Utc>>,
    pub(crate) attempts: i32,
    pub(crate) last_error: Option<String>,
}

#[derive(sqlx::FromRow)]
struct EventRow {
    #[sqlx(flatten, try_from = "EventColumns")]
    event: Option<BusinessEvent>,
}

/// Requests that the participants of an event are notified of a change, if there are any. The request joins one that has not begun.
/// `message`: the message about the change; its id becomes that of the business event.
pub(crate) async fn request_change(
    db: &mut PgConnection,
    message: Uuid,
    event_id: Uuid,
    previous: &Previous,
    delay: TimeDelta,
    pause: TimeDelta,
) -> sqlx::Result<()> {
    // The update locks the announcement that it joins: if that begins now, with the state before this change, it is complete
    // then, and this one is inserted.
    let query = "insert into pillarbox_notify.announcement as known
                     (business_event, event_id, subject, due_at, previous)
                 select $1, $2, $2::text, greatest(statement_timestamp() + $4, (
                     select at + $5 from pillarbox_notify.change_announced where event_id = $2)), $3
                 where exists (select from pillarbox_notify.participant where event_id = $2 and status <> 'left')
                     and not exists (select from pillarbox_notify.announcement where business_event = $1)
                 on conflict (event_id) where previous is not null do update
                     set due_at = coalesce(known.due_at, excluded.due_at),
                         attempts = case when known.due_at is null then 0 else known.attempts end";
    let query = sqlx::query(query).bind(message).bind(event_id).bind(Json(previous)).bind(delay).bind(pause);
    query.execute(db).await.map(drop)
}

/// Saves that people have joined these events, whose confirmations tell them of the changes that are not announced yet.
pub(crate) async fn note_joined(db: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.announcement set joined_since = true
                 where event_id = any($1) and previous is not null and not joined_since";
    sqlx::query(query).bind(events).execute(db).await.map(drop)
}

/// Drops the requests for announcements of changes of these events that have not begun.
pub(crate) async fn drop_changes(db: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<()> {
    let query = "delete from pillarbox_notify.announcement where event_id = any($1) and previous is not null";
    sqlx::query(query).bind(events).execute(db).await.map(drop)
}

/// Saves that the announcement of a change begins. The business event is recorded.
pub(crate) async fn begin_change(db: &mut PgConnection, business_event: Uuid, event_id: Uuid) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.announcement set previous = null where business_event = $1";
    sqlx::query(query).bind(business_event).execute(&mut *db).await?;
    let query = "insert into pillarbox_notify.change_announced (event_id, at) values ($1, statement_timestamp())
                 on conflict (event_id) do update set at = excluded.at";
    sqlx::query(query).bind(event_id).execute(db).await.map(drop)
}

/// Makes an announcement wait for longer.
pub(crate) async fn postpone(db: &mut PgConnection, business_event: Uuid, pause: TimeDelta) -> sqlx::Result<()> {
    let query =
        "update pillarbox_notify.announcement set due_at = statement_timestamp() + $2 where business_event = $1";
    sqlx::query(query).bind(business_event).bind(pause).execute(db).await.map(drop)
}

/// Deletes up to `limit` times of announcements that are older than `age`. Returns how many.
pub(crate) async fn delete_old_changes(db: &mut PgConnection, age: TimeDelta, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_notify.change_announced where event_id in (
                     select event_id from pillarbox_notify.change_announced
                     where at < statement_timestamp() - $1 limit $2)";
    Ok(sqlx::query(query).bind(age).bind(limit).execute(db).await?.rows_affected())
}

/// Requests that the recipients of business events of one aggregate type are notified, in the order of the events.
pub(crate) async fn to_recipients(
    db: &mut PgConnection,
    aggregate_type: &str,
    events: &[&BusinessEvent],
) -> sqlx::Result<()> {
    let query =
        "insert into pillarbox_notify.announcement (business_event, aggregate_type, aggregate_id, subject, due_at)
                 select business_event, $1, aggregate_id, $1 || ':' || aggregate_id, statement_timestamp()
                 from unnest($2::uuid[], $3::bigint[]) with ordinality as new (business_event, aggregate_id, n)
                 order by n on conflict do nothing";
    sqlx::query(query)
        .bind(aggregate_type)
        .bind(events.iter().map(|event| event.id).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.aggregate_id).collect::<Vec<_>>())
        .execute(db)
        .await
        .map(drop)
}

/// Which of the aggregates have events that are still being announced.
pub(crate) async fn announced_aggregates(
    db: &mut PgConnection,
    aggregate_type: &str,
    aggregate_ids: &[i64],
) -> sqlx::Result<HashSet<i64>> {
    let query = "select aggregate_id from unnest($2::bigint[]) as one (aggregate_id)
                 where exists (select from pillarbox_notify.announcement pending
                               where pending.subject = $1 || ':' || one.aggregate_id and pending.due_at is not null)";
    let found: Vec<i64> = sqlx::query_scalar(query).bind(aggregate_type).bind(aggregate_ids).fetch_all(db).await?;
    Ok(HashSet::from_iter(found))
}

/// Locks the announcement that has waited for longest. One that another process works on is skipped, and one that waits for an
/// earlier one about the same event or aggregate: people are notified of changes in their order.
pub(crate) async fn lock_next(db: &mut PgConnection) -> sqlx::Result<Option<Announcement>> {
    let query =
        "select business_event, event_id, aggregate_type, aggregate_id, last_user, attempts, previous, joined_since
                 from pillarbox_notify.announcement one
                 where due_at <= statement_timestamp() and not exists (
                     select from pillarbox_notify.announcement earlier
                     where earlier.subject = one.subject and earlier.id < one.id and earlier.due_at is not null)
                 order by due_at limit 1 for update skip locked";
    sqlx::query_as(query).fetch_optional(db).await
}

/// Saves how far an announcement has come. The others have their turn before it continues.
pub(crate) async fn advance(db: &mut PgConnection, business_event: Uuid, last_user: Uuid) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.announcement
                 set last_user = $2, due_at = statement_timestamp(), attempts = 0, last_error = null
                 where business_event = $1";
    sqlx::query(query).bind(business_event).bind(last_user).execute(db).await.map(drop)
}

/// Saves that a step has failed. It is repeated after a pause; without a pause, the announcement is given up.
pub(crate) async fn record_failure(
    db: &mut PgConnection,
    business_event: Uuid,
    error: &str,
    pause: Option<TimeDelta>,
) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.announcement
                 set attempts = attempts + 1, last_error = $2, due_at = statement_timestamp() + $3
                 where business_event = $1";
    sqlx::query(query).bind(business_event).bind(error).bind(pause).execute(db).await.map(drop)
}

pub(crate) async fn delete(db: &mut PgConnection, business_event: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox_notify.announcement where business_event = $1";
    sqlx::query(query).bind(business_event).execute(db).await.map(drop)
}

/// Returns announcements, newest first, before the id `before`. `given_up`: None matches all.
pub(crate) async fn list(
    db: &mut PgConnection,
    given_up: Option<bool>,
    before: Option<i64>,
    limit: u32,
) -> sqlx::Result<Vec<AnnouncementRecord>> {
    let query = "select id, business_event, subject, last_user, due_at, attempts, last_error
                 from pillarbox_notify.announcement
                 where ($1::boolean is null or (due_at is null) = $1) and ($2::bigint is null or id < $2)
                 order by id desc limit $3";
    sqlx::query_as(query).bind(given_up).bind(before).bind(i64::from(limit)).fetch_all(db).await
}

/// Locks an announcement. Returns whether it was given up; None if it does not exist.
pub(crate) async fn lock(db: &mut PgConnection, id: i64) -> sqlx::Result<Option<bool>> {
    let query = "select due_at is null from pillarbox_notify.announcement where id = $1 for update";
    sqlx::query_scalar(query).bind(id).fetch_optional(db).await
}

/// Makes an announcement due. It has all its attempts again.
pub(crate) async fn retry(db: &mut PgConnection, id: i64) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.announcement set due_at = statement_timestamp(), attempts = 0 where id = $1";
    sqlx::query(query).bind(id).execute(db).await.map(drop)
}

/// The next users to notify, by their ids.
pub(crate) async fn users_after(
    db: &mut PgConnection,
    addressees: &Addressees,
    after: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<Uuid>> {
    let after = after.unwrap_or(Uuid::nil());
    match addressees {
        Addressees::Participants(event_id) => {
            let query = "select user_id from pillarbox_notify.participant
                         where event_id = $1 and user_id > $2 and status <> 'left' order by user_id limit $3";
            sqlx::query_scalar(query).bind(event_id).bind(after).bind(limit).fetch_all(db).await
        }
        Addressees::Recipients { aggregate_type, aggregate_id } => {
            let query = "select user_id from (
                             (select user_id from pillarbox_notify.recipient
                              where aggregate_type = $1 and aggregate_id = $2 and user_id > $3
                              order by user_id limit $4)
                             union
                             (select user_id from pillarbox_notify.recipient
                              where aggregate_type = $1 and aggregate_id is null and user_id > $3
                              order by user_id limit $4)
                         ) recipients order by user_id limit $4";
            let query = sqlx::query_scalar(query).bind(aggregate_type).bind(aggregate_id);
            query.bind(after).bind(limit).fetch_all(db).await
        }
    }
}

/// A recorded business event.
pub(crate) async fn business_event(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<BusinessEvent>> {
    let query = "select id as event_id, event_type, aggregate_type, aggregate_id, payload::text as payload, at
                 from pillarbox_notify.business_event where id = $1";
    let row: Option<EventRow> = sqlx::query_as(query).bind(id).fetch_optional(db).await?;
    Ok(row.and_then(|row| row.event))
}
