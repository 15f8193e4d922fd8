//! SQL of the delivery of notifications.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::delivery_rules::Channel;
use crate::domain::notification::{DeliveryResult, DueNotification, NotNow};

/// A notification that is due, not locked.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct Candidate {
    pub(crate) id: i64,
    pub(crate) due_at: DateTime<Utc>,
    pub(crate) user_id: Uuid,
    #[sqlx(try_from = "&'a str")]
    pub(crate) channel: Channel,
    /// None if the event no longer exists.
    pub(crate) event_type: Option<String>,
    pub(crate) has_contact: bool,
    /// Whether it failed before, or an operator retries it.
    pub(crate) was_tried: bool,
}

/// The e-mails of one event type to one user, which become one e-mail.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct DigestGroup {
    pub(crate) user_id: Uuid,
    #[sqlx(rename = "digest_type")]
    pub(crate) event_type: String,
}

/// How much of each digest is loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DigestLimits {
    /// Notifications of one digest.
    pub(crate) collected: i64,
    /// Notifications whose events are loaded; the others are counted.
    pub(crate) shown: i64,
    /// The size of the loaded payloads as text, however well PostgreSQL compresses them; the first is loaded in any case.
    pub(crate) payload_bytes: i64,
}

/// How many notifications were not delivered now, without being loaded.
#[derive(Debug, Default, sqlx::FromRow)]
pub(crate) struct NotNowCounts {
    #[sqlx(try_from = "i64")]
    pub(crate) skipped: u64,
    #[sqlx(try_from = "i64")]
    pub(crate) postponed: u64,
}

impl NotNowCounts {
    pub(crate) fn add(&mut self, other: NotNowCounts) {
        self.skipped += other.skipped;
        self.postponed += other.postponed;
    }
}

/// A locked notification, without its content.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct ClaimedId {
    pub(crate) id: i64,
    /// The failures so far.
    #[sqlx(try_from = "i32")]
    pub(crate) attempts: u32,
}

/// A notification that was collected for a digest.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct Collected {
    #[sqlx(flatten)]
    pub(crate) group: DigestGroup,
    #[sqlx(flatten)]
    pub(crate) notification: DueNotification,
}

/// The columns of a [`DueNotification`].
const DUE_COLUMNS: &str =
    "n.id, n.user_id, n.channel, n.attempts, n.sender, n.event_id, e.event_type, e.aggregate_type,
    e.aggregate_id, e.payload::text as payload, e.at, c.email, c.name, c.locale, c.tenant,
    exists (select from pillarbox.tenant where name = c.tenant and deleted_at is null) as is_tenant_known,
    d.user_id is not null as has_deleted_account";
/// The tables of a [`DueNotification`], apart from `n`.
const DUE_TABLES: &str = "left join pillarbox_notify.business_event e on e.id = n.event_id
    left join pillarbox_notify.contact c on c.user_id = n.user_id
    left join pillarbox_notify.deleted_account d on d.user_id = n.user_id";

/// Returns the notifications that are due for longest, after the given one; `only_direct`: of those that a person may wait for.
/// The cost does not depend on how many wait.
pub(crate) async fn candidates(
    db: &mut PgConnection,
    only_direct: bool,
    after: Option<(DateTime<Utc>, i64)>,
    limit: i64,
) -> sqlx::Result<Vec<Candidate>> {
    let (due_at, id) = after.unwrap_or((DateTime::UNIX_EPOCH, 0));
    let direct = if only_direct { "and sender is null" } else { "" };
    let query = format!(
        "select n.id, n.due_at, n.user_id, n.channel, e.event_type, c.user_id is not null as has_contact,
             n.attempts > 0 or n.last_error is not null as was_tried
         from (select * from pillarbox_notify.notification
               where status = 'waiting' and due_at <= statement_timestamp() and (due_at, id) > ($1, $2) {direct}
               order by due_at, id limit $3) n
         left join pillarbox_notify.business_event e on e.id = n.event_id
         left join pillarbox_notify.contact c on c.user_id = n.user_id
         order by n.due_at, n.id"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(due_at).bind(id).bind(limit).fetch_all(db).await
}

/// Locks the contacts of these users, except those that another process has locked. Returns the users whose digests and
/// webhooks this transaction may deliver, in the order of their ids.
pub(crate) async fn lock_contacts(db: &mut PgConnection, users: &[Uuid]) -> sqlx::Result<Vec<Uuid>> {
    let query = "select user_id from pillarbox_notify.contact where user_id = any($1)
                 order by user_id for update skip locked";
    sqlx::query_scalar(query).bind(users).fetch_all(db).await
}

/// Locks these notifications, except those that another process has locked or delivered, and returns the first of them whose
/// payloads together have at most `bytes_max` bytes, or the first one alone.
pub(crate) async fn claim(db: &mut PgConnection, ids: &[i64], bytes_max: i64) -> sqlx::Result<Vec<DueNotification>> {
    let query = format!(
        "with locked as materialized (
             select id, due_at, event_id from pillarbox_notify.notification
             where id = any($1) and status = 'waiting' and due_at <= statement_timestamp()
             order by due_at, id for update skip locked
         ), sized as (
             select locked.id, row_number() over in_order as place,
                 sum(octet_length(sized_event.payload::text)) over in_order as bytes
             from locked left join pillarbox_notify.business_event sized_event on sized_event.id = locked.event_id
             window in_order as (order by locked.due_at, locked.id)
         )
         select {DUE_COLUMNS} from sized join pillarbox_notify.notification n on n.id = sized.id {DUE_TABLES}
         where sized.place = 1 or coalesce(sized.bytes, 0) <= $2 order by sized.place"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(ids).bind(bytes_max).fetch_all(db).await
}

/// Locks and returns the due webhooks of these users in the order of their ids, which is that of their events: the first whose
/// payloads together have at most `bytes_max` bytes, or the first one alone. Only the transaction that has locked the
/// contact of a user may call it: two would post them out of order.
pub(crate) async fn claim_webhooks(
    db: &mut PgConnection,
    users: &[Uuid],
    limit: i64,
    bytes_max: i64,
) -> sqlx::Result<Vec<DueNotification>> {
    let query = format!(
        "with locked as materialized (
             select due.id, due.event_id from unnest($1::uuid[]) as users (id) cross join lateral (
                 select id, event_id from pillarbox_notify.notification
                 where user_id = users.id and channel = 'webhook' and channel <> 'in_app' and status = 'waiting'
                     and due_at <= statement_timestamp()
                 order by id limit $2 for update skip locked
             ) due order by due.id limit $2
         ), sized as (
             select locked.id, row_number() over in_order as place,
                 sum(octet_length(sized_event.payload::text)) over in_order as bytes
             from locked left join pillarbox_notify.business_event sized_event on sized_event.id = locked.event_id
             window in_order as (order by locked.id)
         )
         select {DUE_COLUMNS} from sized join pillarbox_notify.notification n on n.id = sized.id {DUE_TABLES}
         where sized.place = 1 or coalesce(sized.bytes, 0) <= $3 order by sized.place"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(users).bind(limit).bind(bytes_max).fetch_all(db).await
}

/// Locks a notification that waits. Returns nothing if another process has locked it.
pub(crate) async fn claim_id(db: &mut PgConnection, id: i64) -> sqlx::Result<Vec<ClaimedId>> {
    let query = "select id, attempts from pillarbox_notify.notification
                 where id = $1 and status = 'waiting' for update skip locked";
    sqlx::query_as(query).bind(id).fetch_all(db).await
}

/// The same for the first webhook of a user that is due.
pub(crate) async fn claim_first_webhook_id(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Vec<ClaimedId>> {
    let query = "select id, attempts from pillarbox_notify.notification
                 where user_id = $1 and channel = 'webhook' and channel <> 'in_app' and status = 'waiting'
                     and due_at <= statement_timestamp()
                 order by id limit 1 for update skip locked";
    sqlx::query_as(query).bind(user).fetch_all(db).await
}

/// The same for the e-mails that [`collect`] returns, without their content.
pub(crate) async fn claim_digest_ids(
    db: &mut PgConnection,
    group: &DigestGroup,
    limit: i64,
) -> sqlx::Result<Vec<ClaimedId>> {
    let query = "select n.id, n.attempts
                 from pillarbox_notify.notification n join pillarbox_notify.business_event e on e.id = n.event_id
                 where n.user_id = $1 and n.channel = 'email' and n.channel <> 'in_app'
                     and n.status = 'waiting' and n.attempts = 0 and n.last_error is null and e.event_type = $2
                 order by n.id limit $3 for update of n skip locked";
    sqlx::query_as(query).bind(group.user_id).bind(&group.event_type).bind(limit).fetch_all(db).await
}

/// Locks and returns the waiting e-mails of these groups, also those that are not due yet, oldest first. Those that were tried
/// before are delivered alone. Beyond the limits, an e-mail has no event: it is only counted. Only the transaction that has
/// locked the contact of a user may call it.
pub(crate) async fn collect(
    db: &mut PgConnection,
    groups: &[DigestGroup],
    limits: DigestLimits,
) -> sqlx::Result<Vec<Collected>> {
    // Rows that are locked are being deleted with their account: waiting for them could be a deadlock.
    // The size is that of the text, because a payload can be compressed to a hundredth of it. To read it, PostgreSQL
    // decompresses the payload, so only those that may be shown are read.
    let query = "select n.*, e.event_type, e.aggregate_type, e.aggregate_id, e.payload::text as payload, e.at,
             c.email, c.name, c.locale, c.tenant, false as is_tenant_known,
             d.user_id is not null as has_deleted_account
         from (
             select placed.*,
                 sum(octet_length(sized.payload::text)) over (partition by placed.number order by placed.id) as bytes
             from (
                 select one.*, digest.user_id, digest.event_type as digest_type, digest.number,
                     row_number() over (partition by digest.number order by one.id) as place
                 from unnest($1::uuid[], $2::text[]) with ordinality as digest (user_id, event_type, number)
                 cross join lateral (
                     select n.id, n.channel, n.attempts, n.sender, n.event_id
                     from pillarbox_notify.notification n
                     join pillarbox_notify.business_event e on e.id = n.event_id
                     where n.user_id = digest.user_id and n.channel = 'email' and n.channel <> 'in_app'
                         and n.status = 'waiting' and n.attempts = 0 and n.last_error is null
                         and e.event_type = digest.event_type
                     order by n.id limit $3 for update of n skip locked
                 ) one
             ) placed
             left join pillarbox_notify.business_event sized on sized.id = placed.event_id and placed.place <= $4
         ) n
         left join pillarbox_notify.business_event e
             on e.id = n.event_id and (n.place = 1 or (n.place <= $4 and n.bytes <= $5))
         left join pillarbox_notify.contact c on c.user_id = n.user_id
         left join pillarbox_notify.deleted_account d on d.user_id = n.user_id
         order by n.id";
    sqlx::query_as(query)
        .bind(groups.iter().map(|group| group.user_id).collect::<Vec<_>>())
        .bind(groups.iter().map(|group| group.event_type.as_str()).collect::<Vec<_>>())
        .bind(limits.collected)
        .bind(limits.shown)
        .bind(limits.payload_bytes)
        .fetch_all(db)
        .await
}

/// Saves that the due e-mails of these groups are skipped or postponed, up to `limit` of each, without loading them.
pub(crate) async fn put_off(
    db: &mut PgConnection,
    groups: &[(DigestGroup, NotNow)],
    limit: i64,
) -> sqlx::Result<NotNowCounts> {
    let parts = |outcome: &NotNow| match outcome {
        NotNow::Postponed(due_at) => ("waiting", Some(*due_at), None),
        NotNow::Skipped(reason) => ("skipped", None, Some(*reason)),
    };
    let query = "with changed as (
             update pillarbox_notify.notification target
             set status = settled.status, due_at = settled.due_at, last_error = settled.reason
             from unnest($1::uuid[], $2::text[], $3::text[], $4::timestamptz[], $5::text[])
                 as settled (user_id, event_type, status, due_at, reason)
             cross join lateral (
                 select n.id from pillarbox_notify.notification n
                 join pillarbox_notify.business_event e on e.id = n.event_id
                 where n.user_id = settled.user_id and n.channel = 'email' and n.channel <> 'in_app'
                     and n.status = 'waiting' and n.attempts = 0 and n.last_error is null
                     and n.due_at <= statement_timestamp() and e.event_type = settled.event_type
                 order by n.id limit $6 for update of n skip locked
             ) due
             where target.id = due.id returning target.status
         )
         select count(*) filter (where status = 'skipped') as skipped,
             count(*) filter (where status = 'waiting') as postponed from changed";
    sqlx::query_as(query)
        .bind(groups.iter().map(|(group, _)| group.user_id).collect::<Vec<_>>())
        .bind(groups.iter().map(|(group, _)| group.event_type.as_str()).collect::<Vec<_>>())
        .bind(groups.iter().map(|(_, outcome)| parts(outcome).0).collect::<Vec<_>>())
        .bind(groups.iter().map(|(_, outcome)| parts(outcome).1).collect::<Vec<_>>())
        .bind(groups.iter().map(|(_, outcome)| parts(outcome).2).collect::<Vec<_>>())
        .bind(limit)
        .fetch_one(db)
        .await
}

/// Saves the results of attempts.
pub(crate) async fn save_results(db: &mut PgConnection, results: &[DeliveryResult]) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.notification n set status = result.status, due_at = result.due_at,
                     attempts = result.attempts,
                     last_error = case when result.status <> 'delivered' then coalesce(result.error, n.last_error) end
                 from unnest($1::bigint[], $2::text[], $3::timestamptz[], $4::int[], $5::text[])
                     as result (id, status, due_at, attempts, error)
                 where n.id = result.id";
    sqlx::query(query)
        .bind(results.iter().map(|result| result.id).collect::<Vec<_>>())
        .bind(results.iter().map(|result| <&str>::from(result.status)).collect::<Vec<_>>())
        .bind(results.iter().map(|result| result.due_at).collect::<Vec<_>>())
        .bind(results.iter().map(|result| i32::try_from(result.attempts).unwrap_or(i32::MAX)).collect::<Vec<_>>())
        .bind(results.iter().map(|result| result.error.clone()).collect::<Vec<_>>())
        .execute(db)
        .await
        .map(drop)
}
