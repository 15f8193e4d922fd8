//! Offers of events, and owners whose accounts were deleted.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use super::event::COLUMNS;
use crate::domain::Event;

/// Offers an event to a user. It replaces an earlier offer.
pub(crate) async fn offer(db: &mut PgConnection, event_id: Uuid, user: Uuid, now: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "insert into pillarbox_events.handover (event_id, user_id, offered_at) values ($1, $2, $3)
                 on conflict (event_id) do update set user_id = excluded.user_id, offered_at = excluded.offered_at";
    sqlx::query(query).bind(event_id).bind(user).bind(now).execute(db).await.map(drop)
}

/// Deletes the offer of an event, if there is one.
pub(crate) async fn withdraw_offer(db: &mut PgConnection, event_id: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox_events.handover where event_id = $1";
    sqlx::query(query).bind(event_id).execute(db).await.map(drop)
}

/// Deletes the offer of an event to a user. Returns false if there is none.
pub(crate) async fn delete_offer(db: &mut PgConnection, event_id: Uuid, user: Uuid) -> sqlx::Result<bool> {
    let query = "delete from pillarbox_events.handover where event_id = $1 and user_id = $2";
    Ok(sqlx::query(query).bind(event_id).bind(user).execute(db).await?.rows_affected() > 0)
}

/// Records that the accounts of these users were deleted, and deletes what was offered to them.
pub(crate) async fn insert_deleted_owners(db: &mut PgConnection, users: &[Uuid]) -> sqlx::Result<()> {
    let query = "insert into pillarbox_events.deleted_owner (user_id, deleted_at, due_at)
                 select user_id, statement_timestamp(), statement_timestamp() from unnest($1::uuid[]) as deleted (user_id)
                 order by user_id on conflict do nothing";
    sqlx::query(query).bind(users).execute(&mut *db).await?;
    let query = "delete from pillarbox_events.handover where user_id = any($1)";
    sqlx::query(query).bind(users).execute(db).await.map(drop)
}

/// Locks the deleted owner that is due for longest and that no other process works on. Returns the id and the time of the
/// deletion.
pub(crate) async fn lock_deleted_owner(db: &mut PgConnection) -> sqlx::Result<Option<(Uuid, DateTime<Utc>)>> {
    let query = "select user_id, deleted_at from pillarbox_events.deleted_owner where due_at <= statement_timestamp()
                 order by due_at limit 1 for update skip locked";
    sqlx::query_as(query).fetch_optional(db).await
}

/// Locks up to `limit` events of a user that have not ended or were never published, and are not canceled.
pub(crate) async fn lock_open_events(
    db: &mut PgConnection,
    owner: Uuid,
    now: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<Event>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_events.event
         where owner_id = $1 and status <> 'canceled' and (end_time > $2 or published_at is null)
         order by id limit $3 for update"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(owner).bind(now).bind(limit).fetch_all(db).await
}

/// Deletes events that were never published, with their histories.
pub(crate) async fn delete_drafts(db: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<()> {
    let query = "delete from pillarbox_events.status_change where event_id = any($1)";
    sqlx::query(query).bind(ids).execute(&mut *db).await?;
    let query = "delete from pillarbox_events.event where id = any($1) and published_at is null";
    sqlx::query(query).bind(ids).execute(db).await.map(drop)
}

/// Makes a deleted owner wait: the next step comes after those of others.
pub(crate) async fn postpone_deleted_owner(db: &mut PgConnection, user: Uuid, pause: TimeDelta) -> sqlx::Result<()> {
    let query = "update pillarbox_events.deleted_owner set due_at = statement_timestamp() + $2 where user_id = $1";
    sqlx::query(query).bind(user).bind(pause).execute(db).await.map(drop)
}

pub(crate) async fn delete_owner(db: &mut PgConnection, user: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox_events.deleted_owner where user_id = $1";
    sqlx::query(query).bind(user).execute(db).await.map(drop)
}
