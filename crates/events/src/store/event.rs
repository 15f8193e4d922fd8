//! Events, their status history and their participant counts.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use contracts::joins::Count;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::{Event, Status, StatusChange, is_public};

pub(super) const COLUMNS: &str = "event.id, event.owner_id, event.title, event.description, event.city, event.city_norm,
    event.category, event.category_norm, event.start_time, event.end_time, event.time_zone, event.capacity, event.status,
    event.active_participants, event.count_version, event.cover_image_ids, event.published_at, event.canceled_at,
    event.created_at, event.updated_at, event.version";

pub(super) const STATUS_CHANGE_COLUMNS: &str =
    "event_id, version, from_status, to_status, changed_by, by_key, reason, at";

/// The columns that decide whether a cached event is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Outline {
    pub(crate) id: Uuid,
    #[sqlx(try_from = "&'a str")]
    status: Status,
    published_at: Option<DateTime<Utc>>,
    pub(crate) version: i64,
    pub(crate) updated_at: DateTime<Utc>,
    pub(crate) active_participants: i32,
}

impl Outline {
    pub(crate) fn is_public(&self) -> bool {
        is_public(self.status, self.published_at)
    }
}

pub(crate) async fn outlines(db: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<Vec<Outline>> {
    let query = "select id, status, published_at, version, updated_at, active_participants
                 from pillarbox_events.event where id = any($1)";
    sqlx::query_as(query).bind(ids).fetch_all(db).await
}

pub(crate) async fn find_all(db: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<Vec<Event>> {
    let query = format!("select {COLUMNS} from pillarbox_events.event where id = any($1)");
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(ids).fetch_all(db).await
}

pub(crate) async fn find(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Event>> {
    Ok(find_all(db, &[id]).await?.pop())
}

/// Finds an event and locks its row until the end of the transaction.
pub(crate) async fn lock(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Event>> {
    let query = format!("select {COLUMNS} from pillarbox_events.event where id = $1 for update");
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).fetch_optional(db).await
}

/// The events of an owner, newest first, before `before`.
pub(crate) async fn list_of_owner(
    db: &mut PgConnection,
    owner_id: Uuid,
    status: Option<Status>,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> sqlx::Result<Vec<Event>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_events.event
         where owner_id = $1 and ($2::text is null or status = $2)
           and ($3::timestamptz is null or (created_at, id) < ($3, $4))
         order by created_at desc, id desc limit $5"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query))
        .bind(owner_id)
        .bind(status.map(|status| status.into_str()))
        .bind(before.map(|(at, _)| at))
        .bind(before.map(|(_, id)| id))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await
}

pub(crate) async fn insert(db: &mut PgConnection, new: &Event) -> sqlx::Result<()> {
    save(
        db,
        new,
        "insert into pillarbox_events.event
             (id, owner_id, title, description, city, city_norm, category, category_norm, start_time, end_time,
              time_zone, capacity, status, cover_image_ids, published_at, canceled_at, created_at, updated_at, version)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)",
    )
    .await
}

/// Saves everything except the participant count, which only the joins service changes.
pub(crate) async fn update(db: &mut PgConnection, changed: &Event) -> sqlx::Result<()> {
    save(
        db,
        changed,
        "update pillarbox_events.event
         set owner_id = $2, title = $3, description = $4, city = $5, city_norm = $6, category = $7, category_norm = $8,
             start_time = $9, end_time = $10, time_zone = $11, capacity = $12, status = $13, cover_image_ids = $14,
             published_at = $15, canceled_at = $16, created_at = $17, updated_at = $18, version = $19
         where id = $1",
    )
    .await
}

async fn save(db: &mut PgConnection, event: &Event, statement: &'static str) -> sqlx::Result<()> {
    let details = &event.details;
    sqlx::query(statement)
        .bind(event.id)
        .bind(event.owner_id)
        .bind(&details.title)
        .bind(&details.description)
        .bind(&details.city.spelled)
        .bind(&details.city.normalized)
        .bind(&details.category.spelled)
        .bind(&details.category.normalized)
        .bind(details.start_time)
        .bind(details.end_time)
        .bind(&details.time_zone)
        .bind(details.capacity)
        .bind(event.status.into_str())
        .bind(&details.cover_image_ids)
        .bind(event.published_at)
        .bind(event.canceled_at)
        .bind(event.created_at)
        .bind(event.updated_at)
        .bind(event.version)
        .execute(db)
        .await
        .map(drop)
}

/// Saves participant counts. The highest version wins, in whatever order and however often they arrive.
pub(crate) async fn save_counts(db: &mut PgConnection, newest: &BTreeMap<Uuid, Count>) -> sqlx::Result<()> {
    // Every transaction locks events in the order of their ids, which prevents deadlocks. The order of a subquery alone
    // would not determine the order in which the update locks the rows.
    sqlx::query(
        "with locked as (
             select event.id, n.active, n.version
             from unnest($1::uuid[], $2::int[], $3::bigint[]) as n (id, active, version)
             join pillarbox_events.event on event.id = n.id
             where event.count_version < n.version
             order by event.id for no key update of event
         )
         update pillarbox_events.event set active_participants = locked.active, count_version = locked.version
         from locked where event.id = locked.id",
    )
    .bind(newest.keys().copied().collect::<Vec<_>>())
    .bind(newest.values().map(|counts| counts.active).collect::<Vec<_>>())
    .bind(newest.values().map(|counts| counts.version).collect::<Vec<_>>())
    .execute(db)
    .await
    .map(drop)
}

pub(crate) async fn insert_status_change(db: &mut PgConnection, change: &StatusChange) -> sqlx::Result<()> {
    sqlx::query(
        "insert into pillarbox_events.status_change
             (event_id, version, from_status, to_status, changed_by, by_key, reason, at)
         values ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(change.event_id)
    .bind(change.version)
    .bind(change.from.map(|status| status.into_str()))
    .bind(change.to.into_str())
    .bind(change.by.id())
    .bind(change.by.is_key())
    .bind(&change.reason)
    .bind(change.at)
    .execute(db)
    .await
    .map(drop)
}

/// The status history of an event, oldest first, after this version.
pub(crate) async fn status_changes(
    db: &mut PgConnection,
    id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> sqlx::Result<Vec<StatusChange>> {
    let query = format!(
        "select {STATUS_CHANGE_COLUMNS} from pillarbox_events.status_change
         where event_id = $1 and version > $2 order by version limit $3"
    );
    let query = sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).bind(after.unwrap_or(0)).bind(i64::from(limit));
    query.fetch_all(db).await
}
