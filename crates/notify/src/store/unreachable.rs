//! SQL of notifications to users without a contact. They wait for it, and are not read again and again.

use chrono::TimeDelta;
use sqlx::PgConnection;
use uuid::Uuid;

use super::delivery::NotNowCounts;

/// How long a notification waits for the contact of its user.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContactTimes {
    /// Until it is read a second time. The contact may have been saved while it was read the first time.
    pub(crate) second: TimeDelta,
    /// Until it is skipped.
    pub(crate) last: TimeDelta,
}

/// Locks those of these notifications that wait and that no other process has locked. Returns their ids.
pub(crate) async fn lock(db: &mut PgConnection, ids: &[i64]) -> sqlx::Result<Vec<i64>> {
    let query = "select id from pillarbox_notify.notification
                 where id = any($1) and status = 'waiting' and due_at <= statement_timestamp() for update skip locked";
    sqlx::query_scalar(query).bind(ids).fetch_all(db).await
}

/// The same for those of the `limit` notifications that are due for longest whose users have no contact.
pub(crate) async fn lock_first(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<i64>> {
    let query = "select n.id from pillarbox_notify.notification n
                 where n.id in (select id from pillarbox_notify.notification
                                where status = 'waiting' and due_at <= statement_timestamp()
                                order by due_at, id limit $1)
                     and n.status = 'waiting' and n.due_at <= statement_timestamp()
                     and not exists (select from pillarbox_notify.contact where contact.user_id = n.user_id)
                     and exists (select from pillarbox_notify.business_event where business_event.id = n.event_id)
                 for update of n skip locked";
    sqlx::query_scalar(query).bind(limit).fetch_all(db).await
}

/// Postpones or skips those of these locked notifications whose users still have no contact. It is a separate statement, so
/// that it sees a contact that was committed before the lock: that transaction has made them due for the last time.
pub(crate) async fn put_off(
    db: &mut PgConnection,
    locked: &[i64],
    times: ContactTimes,
    reason: &str,
) -> sqlx::Result<NotNowCounts> {
    let query = "with changed as (
             update pillarbox_notify.notification n
             set (status, due_at, last_error) = (
                 select case when is_last then 'skipped' else 'waiting' end,
                     case when is_last then null when age < $2 then statement_timestamp() + $2 else n.created_at + $3 end,
                     case when is_last then $4 else n.last_error end
                 from (select age, age >= $3 as is_last from (select statement_timestamp() - n.created_at as age) aged) one
             )
             where n.id = any($1) and not exists (select from pillarbox_notify.contact where contact.user_id = n.user_id)
             returning n.status
         )
         select count(*) filter (where status = 'skipped') as skipped,
             count(*) filter (where status = 'waiting') as postponed from changed";
    sqlx::query_as(query).bind(locked).bind(times.second).bind(times.last).bind(reason).fetch_one(db).await
}

/// Makes what waits for those of these users who have no contact yet due now, up to `limit` of each. To be called before their
/// contacts are inserted, in the same transaction: the deletion of an account locks notifications and contacts in this order.
pub(crate) async fn wake(db: &mut PgConnection, users: &[Uuid], limit: i64) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.notification n set due_at = clock_timestamp()
                 from (
                     select user_id from unnest($1::uuid[]) as given (user_id)
                     where not exists (select from pillarbox_notify.contact where contact.user_id = given.user_id)
                 ) new cross join lateral (
                     select id from pillarbox_notify.notification
                     where user_id = new.user_id and channel <> 'in_app' and status = 'waiting'
                     order by channel, id limit $2 for update
                 ) waiting
                 where n.id = waiting.id";
    sqlx::query(query).bind(users).bind(limit).execute(db).await.map(drop)
}
