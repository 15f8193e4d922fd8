//! SQL of notifications for operators and for retention.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{PgConnection, QueryBuilder};
use uuid::Uuid;

use crate::domain::delivery_rules::Channel;
use crate::domain::notification::NotificationStatus;

/// A notification as operators see it.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct NotificationRecord {
    pub(crate) id: i64,
    pub(crate) event_id: Uuid,
    pub(crate) event_type: Option<String>,
    pub(crate) user_id: Uuid,
    #[sqlx(try_from = "&'a str")]
    pub(crate) channel: Channel,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: NotificationStatus,
    pub(crate) due_at: Option<DateTime<Utc>>,
    pub(crate) attempts: i32,
    pub(crate) last_error: Option<String>,
    pub(crate) created_at: DateTime<Utc>,
}

/// Selects notifications; a None field matches all.
#[derive(Debug, Default)]
pub(crate) struct NotificationFilter {
    pub(crate) status: Option<NotificationStatus>,
    pub(crate) channel: Option<Channel>,
    pub(crate) user_id: Option<Uuid>,
    pub(crate) event_type: Option<String>,
    pub(crate) event_ids: Option<Vec<Uuid>>,
}

/// Selects dead notifications; a None field matches all.
#[derive(Debug, Clone, Default)]
pub struct DeadNotifications {
    pub channel: Option<Channel>,
    pub event_type: Option<String>,
    pub user_id: Option<Uuid>,
    /// Only those that were created before this time.
    pub to: Option<DateTime<Utc>>,
}

/// Returns notifications, newest first, before the id `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    filter: &NotificationFilter,
    before: Option<i64>,
    limit: u32,
) -> sqlx::Result<Vec<NotificationRecord>> {
    let mut query = QueryBuilder::new(
        "select n.*, e.event_type from pillarbox_notify.notification n
         left join pillarbox_notify.business_event e on e.id = n.event_id where true",
    );
    if let Some(status) = filter.status {
        query.push(" and n.status = ").push_bind(<&str>::from(status));
    }
    if let Some(channel) = filter.channel {
        query.push(" and n.channel = ").push_bind(<&str>::from(channel));
    }
    if let Some(user_id) = filter.user_id {
        // Each channel has an index by user.
        query.push(" and ((n.channel = 'in_app' and n.user_id = ").push_bind(user_id);
        query.push(") or (n.channel <> 'in_app' and n.user_id = ").push_bind(user_id).push("))");
    }
    if let Some(event_type) = &filter.event_type {
        query.push(" and e.event_type = ").push_bind(event_type);
    }
    if let Some(event_ids) = &filter.event_ids {
        query.push(" and n.event_id = any(").push_bind(event_ids).push(")");
    }
    if let Some(before) = before {
        query.push(" and n.id < ").push_bind(before);
    }
    query.push(" order by n.id desc limit ").push_bind(i64::from(limit));
    query.build_query_as().fetch_all(db).await
}

#[derive(sqlx::FromRow)]
struct LockedNotification {
    #[sqlx(try_from = "&'a str")]
    status: NotificationStatus,
}

/// Locks a notification. Returns its status; None if it does not exist.
pub(crate) async fn lock(db: &mut PgConnection, id: i64) -> sqlx::Result<Option<NotificationStatus>> {
    let query = "select status from pillarbox_notify.notification where id = $1 for update";
    let locked: Option<LockedNotification> = sqlx::query_as(query).bind(id).fetch_optional(db).await?;
    Ok(locked.map(|locked| locked.status))
}

/// Makes a notification due again.
pub(crate) async fn retry(db: &mut PgConnection, id: i64) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.notification
                 set status = 'waiting', attempts = 0, due_at = statement_timestamp() where id = $1";
    sqlx::query(query).bind(id).execute(db).await.map(drop)
}

/// Makes up to `limit` dead notifications due again, with an id above `after`, in the order of their ids. Returns their ids.
pub(crate) async fn retry_dead(
    db: &mut PgConnection,
    selection: &DeadNotifications,
    after: i64,
    limit: i64,
) -> sqlx::Result<Vec<i64>> {
    let query = "update pillarbox_notify.notification
                 set status = 'waiting', attempts = 0, due_at = statement_timestamp()
                 where id in (
                     select n.id from pillarbox_notify.notification n
                     where n.status = 'dead' and n.id > $4 and ($1::text is null or n.channel = $1)
                         and ($2::uuid is null or n.user_id = $2)
                         and ($3::text is null or exists (
                             select from pillarbox_notify.business_event e where e.id = n.event_id and e.event_type = $3))
                         and ($6::timestamptz is null or n.created_at < $6)
                     order by n.id limit $5 for update skip locked
                 ) returning id";
    let query = sqlx::query_scalar(query).bind(selection.channel.map(<&str>::from)).bind(selection.user_id);
    query.bind(&selection.event_type).bind(after).bind(limit).bind(selection.to).fetch_all(db).await
}

/// Locks up to `limit` notifications that are older than `age`, and do not wait, after the inboxes that they are in, so that
/// the counts of unread ones stay exact; deletes them. Returns how many.
pub(crate) async fn delete_older(db: &mut PgConnection, age: TimeDelta, limit: i64) -> sqlx::Result<u64> {
    let old = "select id, user_id from pillarbox_notify.notification
               where created_at < statement_timestamp() - $1 and status <> 'waiting' order by created_at limit $2";
    let old: Vec<(i64, Uuid)> = sqlx::query_as(old).bind(age).bind(limit).fetch_all(&mut *db).await?;
    let (ids, users): (Vec<i64>, Vec<Uuid>) = old.into_iter().unzip();
    let lock = "select from pillarbox_notify.inbox where user_id = any($1) order by user_id for update";
    sqlx::query(lock).bind(&users).execute(&mut *db).await?;
    let delete = "with deleted as (
                      delete from pillarbox_notify.notification where id = any($1) and status <> 'waiting'
                      returning user_id, channel = 'in_app' and read_at is null as was_unread
                  ), counted as (
                      select user_id, count(*) as unread from deleted where was_unread group by user_id
                  ), corrected as (
                      update pillarbox_notify.inbox set unread = inbox.unread - counted.unread
                      from counted where inbox.user_id = counted.user_id
                  )
                  select count(*) from deleted";
    let deleted: i64 = sqlx::query_scalar(delete).bind(&ids).fetch_one(db).await?;
    Ok(deleted.unsigned_abs())
}

/// Deletes up to `limit` events that are older than `age` and have no notifications any more. Returns how many.
pub(crate) async fn delete_older_events(db: &mut PgConnection, age: TimeDelta, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_notify.business_event where id in (
                     select id from pillarbox_notify.business_event event
                     where at < statement_timestamp() - $1 and not exists (
                         select from pillarbox_notify.notification n where n.event_id = event.id)
                     order by at limit $2
                 )";
    Ok(sqlx::query(query).bind(age).bind(limit).execute(db).await?.rows_affected())
}

/// The state of the queue. Counts stop at a maximum, so that the cost does not grow with a backlog.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct DeliveryState {
    pub(crate) due: i64,
    pub(crate) dead: i64,
    pub(crate) oldest_seconds: f64,
}

pub(crate) async fn state(db: &mut PgConnection, count_max: i64) -> sqlx::Result<DeliveryState> {
    let query = "select
         (select count(*) from (select from pillarbox_notify.notification
             where status = 'waiting' and due_at <= statement_timestamp() limit $1) due) as due,
         (select count(*) from (select from pillarbox_notify.notification where status = 'dead' limit $1) dead) as dead,
         coalesce((select extract(epoch from statement_timestamp() - min(due_at))::float8
             from pillarbox_notify.notification where status = 'waiting' and due_at <= statement_timestamp()), 0)
             as oldest_seconds";
    sqlx::query_as(query).bind(count_max).fetch_one(db).await
}
