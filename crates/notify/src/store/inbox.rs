//! SQL of the in-app inbox. Every change of a notification in an inbox locks the inbox first, so that its count of unread
//! ones is exact.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres, QueryBuilder};
use uuid::Uuid;

use crate::domain::business_event::{BusinessEvent, EventColumns};

/// A notification in an inbox.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct InboxEntry {
    pub(crate) seq: i64,
    pub(crate) event_id: Uuid,
    /// None: it was deleted after its retention.
    #[sqlx(flatten, try_from = "EventColumns")]
    pub(crate) event: Option<BusinessEvent>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) read_at: Option<DateTime<Utc>>,
    pub(crate) archived_at: Option<DateTime<Utc>>,
}

impl InboxEntry {
    /// The approximate size of the notification, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.event.as_ref().map_or(0, |event| event.payload.get().len())
    }
}

/// The state of an inbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct InboxState {
    pub(crate) last_seq: i64,
    pub(crate) unread: i32,
}

/// Selects the notifications of a list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InboxFilter {
    /// Some: only unread ones, or only read ones.
    pub(crate) unread: Option<bool>,
    pub(crate) archived: bool,
}

/// The change of one notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InboxChange {
    Read,
    /// It also returns from the archive.
    Unread,
    /// It is also read.
    Archive,
}

/// How much one query loads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoadLimits {
    pub(crate) count: u32,
    /// The query ends one notification after that with which the events reach this size. Otherwise 100 notifications could have
    /// 25 MB.
    pub(crate) bytes: usize,
}

/// Returns notifications of a user, newest first, before the number `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    user: Uuid,
    filter: InboxFilter,
    before: Option<i64>,
    limits: LoadLimits,
) -> sqlx::Result<Vec<InboxEntry>> {
    let mut query = entries_of(user, "seq desc");
    if let Some(is_unread) = filter.unread {
        query.push(if is_unread { " and n.read_at is null" } else { " and n.read_at is not null" });
    }
    query.push(if filter.archived { " and n.archived_at is not null" } else { " and n.archived_at is null" });
    if let Some(before) = before {
        query.push(" and n.seq < ").push_bind(before);
    }
    load(db, query, "seq desc", limits).await
}

/// Returns notifications of a user after the number `after`, in order.
pub(crate) async fn after(
    db: &mut PgConnection,
    user: Uuid,
    after: i64,
    limits: LoadLimits,
) -> sqlx::Result<Vec<InboxEntry>> {
    let mut query = entries_of(user, "seq");
    query.push(" and n.seq > ").push_bind(after);
    load(db, query, "seq", limits).await
}

/// Returns one notification of a user.
pub(crate) async fn one(db: &mut PgConnection, user: Uuid, seq: i64) -> sqlx::Result<Option<InboxEntry>> {
    let mut query = entries_of(user, "seq");
    query.push(" and n.seq = ").push_bind(seq);
    Ok(load(db, query, "seq", LoadLimits { count: 1, bytes: 0 }).await?.pop())
}

/// The beginning of a query for notifications in this order; [`load`] adds the end.
fn entries_of(user: Uuid, order: &str) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new(format!(
        "select * from (
             select n.*, e.event_type, e.aggregate_type, e.aggregate_id, e.payload::text as payload, e.at,
                 coalesce(sum(octet_length(e.payload::text)) over
                     (order by n.{order} rows between unbounded preceding and 2 preceding), 0) as bytes_before
             from (select n.seq, n.event_id, n.created_at, n.read_at, n.archived_at
                   from pillarbox_notify.notification n where n.channel = 'in_app' and n.user_id = "
    ));
    query.push_bind(user);
    query
}

async fn load(
    db: &mut PgConnection,
    mut query: QueryBuilder<Postgres>,
    order: &str,
    LoadLimits { count, bytes }: LoadLimits,
) -> sqlx::Result<Vec<InboxEntry>> {
    query.push(format!(" order by n.{order} limit ")).push_bind(i64::from(count));
    query.push(") n left join pillarbox_notify.business_event e on e.id = n.event_id) page where bytes_before <= ");
    query.push_bind(bytes as i64).push(format!(" order by {order}"));
    query.build_query_as().fetch_all(db).await
}

/// Returns the state of a user's inbox; zeros if there is none yet.
pub(crate) async fn state(db: &mut PgConnection, user: Uuid) -> sqlx::Result<InboxState> {
    let query = "select last_seq, unread from pillarbox_notify.inbox where user_id = $1";
    Ok(sqlx::query_as(query).bind(user).fetch_optional(db).await?.unwrap_or_default())
}

/// Locks an inbox until the end of the transaction. None if there is none yet.
pub(crate) async fn lock(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Option<InboxState>> {
    let query = "select last_seq, unread from pillarbox_notify.inbox where user_id = $1 for update";
    sqlx::query_as(query).bind(user).fetch_optional(db).await
}

/// Changes one notification of a locked inbox. Returns by how much the count of unread ones changes; None if it does not
/// exist.
pub(crate) async fn change(
    db: &mut PgConnection,
    user: Uuid,
    seq: i64,
    change: InboxChange,
) -> sqlx::Result<Option<i32>> {
    let query = match change {
        InboxChange::Read => {
            "update pillarbox_notify.notification target set read_at = coalesce(target.read_at, statement_timestamp())"
        }
        InboxChange::Unread => "update pillarbox_notify.notification target set read_at = null, archived_at = null",
        InboxChange::Archive => {
            "update pillarbox_notify.notification target set read_at = coalesce(target.read_at, statement_timestamp()),
                 archived_at = coalesce(target.archived_at, statement_timestamp())"
        }
    };
    let query = format!(
        "{query} from pillarbox_notify.notification before
         where target.user_id = $1 and target.seq = $2 and target.channel = 'in_app' and before.id = target.id
         returning (target.read_at is null)::int - (before.read_at is null)::int"
    );
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(user).bind(seq).fetch_optional(db).await
}

/// Marks unread notifications of a locked inbox, up to this number, as read: at most `limit`, the oldest first. Returns how many.
pub(crate) async fn read_up_to(db: &mut PgConnection, user: Uuid, seq: i64, limit: i32) -> sqlx::Result<i32> {
    let query = "update pillarbox_notify.notification set read_at = statement_timestamp()
                 where id = any(array(select id from pillarbox_notify.notification
                     where user_id = $1 and channel = 'in_app' and seq <= $2 and read_at is null
                     order by seq limit $3))";
    let done = sqlx::query(query).bind(user).bind(seq).bind(limit).execute(db).await?;
    // At most `limit`.
    Ok(i32::try_from(done.rows_affected()).unwrap_or(limit))
}

/// Changes the count of unread notifications of a locked inbox. Returns the new state.
pub(crate) async fn add_unread(db: &mut PgConnection, user: Uuid, difference: i32) -> sqlx::Result<InboxState> {
    let query = "update pillarbox_notify.inbox set unread = unread + $2 where user_id = $1 returning last_seq, unread";
    sqlx::query_as(query).bind(user).bind(difference).fetch_one(db).await
}

/// Returns the name and the locale of a user, empty and `en` if there is no contact.
pub(crate) async fn reader(db: &mut PgConnection, user: Uuid) -> sqlx::Result<(String, String)> {
    let query = "select name, locale from pillarbox_notify.contact where user_id = $1";
    let reader = sqlx::query_as(query).bind(user).fetch_optional(db).await?;
    Ok(reader.unwrap_or_else(|| (String::new(), "en".to_owned())))
}

/// Returns when the notification with this number was created; None if there is none.
pub(crate) async fn created_at(db: &mut PgConnection, user: Uuid, seq: i64) -> sqlx::Result<Option<DateTime<Utc>>> {
    let query = "select created_at from pillarbox_notify.notification
                 where user_id = $1 and channel = 'in_app' and seq = $2";
    sqlx::query_scalar(query).bind(user).bind(seq).fetch_optional(db).await
}

/// Returns the number of the last notification that was created at this time or before; 0 if there is none.
pub(crate) async fn last_until(db: &mut PgConnection, user: Uuid, time: DateTime<Utc>) -> sqlx::Result<i64> {
    let query = "select seq from pillarbox_notify.notification
                 where user_id = $1 and channel = 'in_app' and created_at <= $2 order by seq desc limit 1";
    Ok(sqlx::query_scalar(query).bind(user).bind(time).fetch_optional(db).await?.unwrap_or(0))
}

/// The number of the last notification that any transaction has begun to insert; 0 before the first. It may not have committed
/// yet.
pub(crate) async fn last_begun(db: &mut PgConnection) -> sqlx::Result<i64> {
    // Before and after its first use, the sequence has the same value.
    let query = "select case when is_called then last_value else 0 end from pillarbox_notify.notification_id_seq";
    sqlx::query_scalar(query).fetch_one(db).await
}

/// Returns the last numbers of those inboxes that are beyond the known ones.
pub(crate) async fn advanced(db: &mut PgConnection, known: &HashMap<Uuid, i64>) -> sqlx::Result<Vec<(Uuid, i64)>> {
    let query = "select inbox.user_id, inbox.last_seq
                 from unnest($1::uuid[], $2::bigint[]) as known (user_id, last_seq)
                 join pillarbox_notify.inbox on inbox.user_id = known.user_id and inbox.last_seq > known.last_seq";
    let (users, numbers): (Vec<Uuid>, Vec<i64>) = known.iter().map(|(user, seq)| (*user, *seq)).unzip();
    sqlx::query_as(query).bind(users).bind(numbers).fetch_all(db).await
}
