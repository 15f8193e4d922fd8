//! SQL of the notify service. Every function joins the caller's transaction. Here: e-mails.

pub(crate) mod accounts;
pub(crate) mod announcements;
pub(crate) mod delivery;
pub(crate) mod inbox;
pub(crate) mod notifications;
pub(crate) mod preferences;

pub(crate) mod expansion;
pub(crate) mod participants;
pub(crate) mod recipients;
pub(crate) mod unreachable;

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{AssertSqlSafe, PgConnection, QueryBuilder};
use uuid::Uuid;

use crate::domain::{AttemptResult, ClaimedMail, NewMail, Status};

/// An e-mail as the list shows it.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct MailRecord {
    pub(crate) id: i64,
    pub(crate) recipient: String,
    pub(crate) subject: String,
    #[sqlx(flatten)]
    pub(crate) content: StoredContent,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: Status,
    pub(crate) template: String,
    pub(crate) locale: String,
    pub(crate) attempts: i32,
    pub(crate) last_error: Option<String>,
    pub(crate) smtp_reply: Option<String>,
    pub(crate) next_attempt_at: DateTime<Utc>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) sent_at: Option<DateTime<Utc>>,
}

/// The parts of an e-mail that are for its recipient.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct StoredContent {
    pub(crate) text: Option<String>,
    pub(crate) html: Option<String>,
    pub(crate) unsubscribe: Option<String>,
}

/// Selects e-mails; a None field matches all.
#[derive(Debug, Default)]
pub(crate) struct MailFilter {
    pub(crate) recipient: Option<String>,
    pub(crate) status: Option<Status>,
    pub(crate) template: Option<String>,
}

/// Selects dead e-mails; a None field matches all.
#[derive(Debug, Clone, Default)]
pub struct DeadMails {
    pub(crate) recipient: Option<String>,
    pub(crate) template: Option<String>,
}

/// Inserts e-mails, except those that exist and those of deleted accounts. Bodies are stored if the status has them.
pub(crate) async fn insert(db: &mut PgConnection, mails: &[NewMail]) -> sqlx::Result<()> {
    let body = |mail: &NewMail, text: &str| mail.status.has_bodies().then(|| text.to_owned());
    // Start-time fair queueing: an e-mail has its turn after the previous one of its sender, and not before the first one that
    // waits now. So a sender with many e-mails delays one of another sender by one e-mail.
    let query = format!(
        "insert into pillarbox_notify.mail (message_id, source, idempotency_key, user_id, recipient, template, locale,
             subject, text, html, status, next_attempt_at, give_up_at, expires_at, unsubscribe, sender, created_at, turn)
         select message_id, source, idempotency_key, user_id, recipient, template, locale, subject, text, html, status,
             created_at, give_up_at, expires_at, unsubscribe, new.sender, created_at,
             greatest(coalesce((select min(turn) from pillarbox_notify.mail where {WAITS_FOR_TURN}), 0), last.turn + 1)
                 + row_number() over (partition by new.sender order by new.n) - 1
         from unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::text[], $6::text[],
             $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::timestamptz[], $13::timestamptz[],
             $14::timestamptz[], $15::text[], $16::text[]) with ordinality as new (message_id, source, idempotency_key,
             user_id, recipient, template, locale, subject, text, html, status, created_at, give_up_at, expires_at,
             unsubscribe, sender, n)
         cross join lateral (
             select max(turn) as turn from pillarbox_notify.mail where mail.sender = new.sender and {WAITS_FOR_TURN}
         ) last
         where not exists (select from pillarbox_notify.deleted_account deleted where deleted.user_id = new.user_id)
         on conflict do nothing"
    );
    sqlx::query(AssertSqlSafe(query))
        .bind(mails.iter().map(|mail| mail.message_id).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.source.clone()).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.idempotency_key.clone()).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.user_id).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.recipient.clone()).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.template.clone()).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.content.locale.clone()).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.content.subject.clone()).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| body(mail, &mail.content.text)).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| body(mail, &mail.content.html)).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| <&str>::from(mail.status)).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.created_at).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.give_up_at).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.expires_at).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.unsubscribe.clone()).collect::<Vec<_>>())
        .bind(mails.iter().map(|mail| mail.sender.clone()).collect::<Vec<_>>())
        .execute(db)
        .await
        .map(drop)
}

/// The e-mails of notifications that wait for their turn: they were not tried yet. As in the indexes.
const WAITS_FOR_TURN: &str = "status = 'queued' and source = 'notify' and claim is null and attempts = 0";

/// Claims e-mails that are due, for the time of the lease. Those of other services first, so that a password reset does not
/// wait behind notifications. Of these, the senders take turns, and a quarter is for those that were tried before. Rows that
/// another process is claiming are skipped.
pub(crate) async fn claim(db: &mut PgConnection, limit: usize, lease: Duration) -> sqlx::Result<Vec<ClaimedMail>> {
    let query = format!(
        "with first as materialized (
             select id from pillarbox_notify.mail
             where status = 'queued' and source <> 'notify' and next_attempt_at <= statement_timestamp()
             order by next_attempt_at limit $3 for update skip locked
         ), in_turn as materialized (
             select id from pillarbox_notify.mail where {WAITS_FOR_TURN}
             order by turn, id limit ($3 - (select count(*) from first)) * 3 / 4 for update skip locked
         ), repeated as materialized (
             select id from pillarbox_notify.mail
             where status = 'queued' and source = 'notify' and (claim is not null or attempts > 0)
                 and next_attempt_at <= statement_timestamp()
             order by next_attempt_at limit $3 - (select count(*) from first) - (select count(*) from in_turn)
             for update skip locked
         ), more as materialized (
             select id from pillarbox_notify.mail
             where {WAITS_FOR_TURN} and id not in (select id from in_turn)
             order by turn, id limit $3 - (select count(*) from first) - (select count(*) from in_turn)
                 - (select count(*) from repeated)
             for update skip locked
         ), due as (
             select id from first union all select id from in_turn union all select id from repeated
             union all select id from more
         )
         update pillarbox_notify.mail mail set claim = $1, next_attempt_at = statement_timestamp() + $2
         from due where mail.id = due.id
         returning mail.*, statement_timestamp() as now"
    );
    sqlx::query_as(AssertSqlSafe(query))
        .bind(Uuid::new_v4())
        .bind(TimeDelta::from_std(lease).unwrap_or(TimeDelta::MAX))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(db)
        .await
}

/// Saves the results of attempts. A failure is saved only while the claim of the attempt is valid, and a success in any
/// case: the e-mail has been sent, also if another process has claimed it since. Returns the ids of the e-mails that changed.
pub(crate) async fn save_results(db: &mut PgConnection, results: &[AttemptResult]) -> sqlx::Result<Vec<i64>> {
    let pause = |result: &AttemptResult| TimeDelta::from_std(result.pause).unwrap_or(TimeDelta::MAX);
    let has_bodies = |result: &AttemptResult| result.status.has_bodies();
    sqlx::query_scalar(
        "update pillarbox_notify.mail mail set
             status = result.status,
             text = case when result.has_bodies then mail.text end,
             html = case when result.has_bodies then mail.html end,
             attempts = mail.attempts + result.counts::int,
             next_attempt_at = statement_timestamp() + result.pause,
             claim = null,
             last_error = case when result.status = 'sent' then null else coalesce(result.error, mail.last_error) end,
             smtp_reply = result.reply,
             sent_at = case when result.status = 'sent' then statement_timestamp() end
         from unnest($1::bigint[], $2::uuid[], $3::text[], $4::bool[], $5::bool[], $6::interval[], $7::text[], $8::text[])
             as result (id, claim, status, counts, has_bodies, pause, reply, error)
         where mail.id = result.id and mail.status = 'queued'
             and (mail.claim = result.claim or result.status = 'sent')
         returning mail.id",
    )
    .bind(results.iter().map(|result| result.id).collect::<Vec<_>>())
    .bind(results.iter().map(|result| result.claim).collect::<Vec<_>>())
    .bind(results.iter().map(|result| <&str>::from(result.status)).collect::<Vec<_>>())
    .bind(results.iter().map(|result| result.counts).collect::<Vec<_>>())
    .bind(results.iter().map(has_bodies).collect::<Vec<_>>())
    .bind(results.iter().map(pause).collect::<Vec<_>>())
    .bind(results.iter().map(|result| result.reply.clone()).collect::<Vec<_>>())
    .bind(results.iter().map(|result| result.error.clone()).collect::<Vec<_>>())
    .fetch_all(db)
    .await
}

/// Returns e-mails, newest first, before the id `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    filter: &MailFilter,
    before: Option<i64>,
    limit: u32,
) -> sqlx::Result<Vec<MailRecord>> {
    let mut query = QueryBuilder::new("select * from pillarbox_notify.mail where true");
    if let Some(recipient) = &filter.recipient {
        query.push(" and lower(recipient) = lower(").push_bind(recipient).push(")");
    }
    if let Some(status) = filter.status {
        query.push(" and status = ").push_bind(<&str>::from(status));
    }
    if let Some(template) = &filter.template {
        query.push(" and template = ").push_bind(template);
    }
    if let Some(before) = before {
        query.push(" and id < ").push_bind(before);
    }
    query.push(" order by id desc limit ").push_bind(i64::from(limit));
    query.build_query_as().fetch_all(db).await
}

/// The columns that decide whether an e-mail can be sent again.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct LockedMail {
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: Status,
    pub(crate) has_bodies: bool,
}

/// Locks an e-mail. Returns None if it does not exist.
pub(crate) async fn lock(db: &mut PgConnection, id: i64) -> sqlx::Result<Option<LockedMail>> {
    let query = "select status, text is not null and html is not null as has_bodies from pillarbox_notify.mail
                 where id = $1 for update";
    sqlx::query_as(query).bind(id).fetch_optional(db).await
}

/// Queues an e-mail again. It is due now.
pub(crate) async fn queue_again(db: &mut PgConnection, id: i64, retry_time: TimeDelta) -> sqlx::Result<()> {
    let query =
        "update pillarbox_notify.mail set status = 'queued', attempts = 0, next_attempt_at = statement_timestamp(),
                     give_up_at = statement_timestamp() + $2
                 where id = $1";
    sqlx::query(query).bind(id).bind(retry_time).execute(db).await.map(drop)
}

/// Queues up to `limit` dead e-mails again whose bodies still exist, with an id above `after`, in the order of their ids. They
/// are due now. Returns their ids.
pub(crate) async fn queue_dead_again(
    db: &mut PgConnection,
    selection: &DeadMails,
    after: i64,
    limit: i64,
    retry_time: TimeDelta,
) -> sqlx::Result<Vec<i64>> {
    let query =
        "update pillarbox_notify.mail set status = 'queued', attempts = 0, next_attempt_at = statement_timestamp(),
                     give_up_at = statement_timestamp() + $5
                 where id in (
                     select id from pillarbox_notify.mail
                     where status = 'dead' and text is not null and html is not null and id > $3
                         and ($1::text is null or lower(recipient) = lower($1)) and ($2::text is null or template = $2)
                     order by id limit $4 for update skip locked
                 ) returning id";
    let query = sqlx::query_scalar(query).bind(&selection.recipient).bind(&selection.template);
    query.bind(after).bind(limit).bind(retry_time).fetch_all(db).await
}

/// Erases the bodies of up to `limit` e-mails that have expired; of these, queued ones become expired. Claimed ones are left
/// to their sender. Returns how many changed.
pub(crate) async fn expire(db: &mut PgConnection, limit: i64) -> sqlx::Result<u64> {
    let query = "update pillarbox_notify.mail set text = null, html = null,
                     status = case when status = 'queued' then 'expired' else status end
                 where id in (
                     select id from pillarbox_notify.mail
                     where status in ('queued', 'dead') and text is not null and expires_at <= statement_timestamp()
                         and (claim is null or next_attempt_at <= statement_timestamp())
                     limit $1 for update skip locked
                 )";
    Ok(sqlx::query(query).bind(limit).execute(db).await?.rows_affected())
}

/// Deletes up to `limit` e-mails that are not queued and older than `age`. Returns how many.
pub(crate) async fn delete_older(db: &mut PgConnection, age: TimeDelta, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_notify.mail where id in (
                     select id from pillarbox_notify.mail
                     where status <> 'queued' and created_at < statement_timestamp() - $1 limit $2
                 )";
    Ok(sqlx::query(query).bind(age).bind(limit).execute(db).await?.rows_affected())
}

/// Deletes captured e-mails that are older than `age` or not among the newest `count`, up to `limit` of them. Returns how
/// many.
pub(crate) async fn delete_captured(
    db: &mut PgConnection,
    age: TimeDelta,
    count: i64,
    limit: i64,
) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_notify.mail where id in (
                     select id from pillarbox_notify.mail
                     where status = 'captured' and (created_at < statement_timestamp() - $1 or id <= (
                         select id from pillarbox_notify.mail where status = 'captured'
                         order by id desc offset $2 limit 1
                     ))
                     order by id limit $3
                 )";
    Ok(sqlx::query(query).bind(age).bind(count).bind(limit).execute(db).await?.rows_affected())
}

/// Whether an e-mail has been due for longer than `time`.
pub(crate) async fn is_overdue(db: &mut PgConnection, time: TimeDelta) -> sqlx::Result<bool> {
    let query = "select exists (select from pillarbox_notify.mail
                     where status = 'queued' and next_attempt_at < statement_timestamp() - $1)";
    sqlx::query_scalar(query).bind(time).fetch_one(db).await
}

/// The state of the queue. Counts stop at a maximum, so that the cost does not grow with a backlog.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct QueueState {
    pub(crate) queued: i64,
    pub(crate) dead: i64,
    pub(crate) oldest_seconds: f64,
}

pub(crate) async fn queue_state(db: &mut PgConnection, count_max: i64) -> sqlx::Result<QueueState> {
    let query = "select
         (select count(*) from (select from pillarbox_notify.mail where status = 'queued' limit $1) queued) as queued,
         (select count(*) from (select from pillarbox_notify.mail where status = 'dead' limit $1) dead) as dead,
         coalesce((select extract(epoch from statement_timestamp() - min(created_at))::float8
                   from pillarbox_notify.mail where status = 'queued'), 0) as oldest_seconds";
    sqlx::query_as(query).bind(count_max).fetch_one(db).await
}

/// How many e-mails and notifications were given up and can be retried.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, sqlx::FromRow)]
pub struct GivenUp {
    pub mails: i64,
    pub notifications: i64,
}

/// Counts each kind up to `count_max`.
pub(crate) async fn count_dead(db: &mut PgConnection, count_max: i64) -> sqlx::Result<GivenUp> {
    let query = "select
         (select count(*) from (select from pillarbox_notify.mail where status = 'dead' limit $1) dead) as mails,
         (select count(*) from (select from pillarbox_notify.notification where status = 'dead' limit $1) dead)
             as notifications";
    sqlx::query_as(query).bind(count_max).fetch_one(db).await
}
