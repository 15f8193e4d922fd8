//! Deleted accounts: what is stored about their users is deleted.

use chrono::TimeDelta;
use sqlx::PgConnection;
use uuid::Uuid;

/// The rows about users, except e-mails, by `user_id`. One order of locks: a handler locks participants, then inboxes, each
/// in the order of their keys, and an import contacts, then recipients.
const DELETE_OF_USERS: [&str; 14] = [
    "select from pillarbox_notify.participant where user_id = any($1) order by event_id, user_id for update",
    "delete from pillarbox_notify.participant where user_id = any($1)",
    "delete from pillarbox_notify.waiting_registration where user_id = any($1)",
    "select from pillarbox_notify.inbox where user_id = any($1) order by user_id for update",
    "delete from pillarbox_notify.inbox where user_id = any($1)",
    // Two statements, because each of the indexes by user has only one of the two kinds.
    "delete from pillarbox_notify.notification where user_id = any($1) and channel = 'in_app'",
    "delete from pillarbox_notify.notification where user_id = any($1) and channel <> 'in_app'",
    "select from pillarbox_notify.contact where user_id = any($1) order by user_id for update",
    "delete from pillarbox_notify.contact where user_id = any($1)",
    "delete from pillarbox_notify.recipient where user_id = any($1)",
    "select from pillarbox_notify.preference_set where user_id = any($1) order by user_id for update",
    "delete from pillarbox_notify.preference_set where user_id = any($1)",
    "delete from pillarbox_notify.preference where user_id = any($1)",
    "delete from pillarbox_notify.quiet_hours where user_id = any($1)",
];

/// Records that these accounts are deleted, and deletes everything about their users.
pub(crate) async fn delete_accounts(db: &mut PgConnection, users: &[Uuid]) -> sqlx::Result<()> {
    let record = "insert into pillarbox_notify.deleted_account (user_id, deleted_at)
                  select distinct user_id, statement_timestamp() from unnest($1::uuid[]) as deleted (user_id)
                  order by user_id on conflict do nothing";
    sqlx::query(record).bind(users).execute(&mut *db).await?;
    delete_of_users(db, users).await
}

/// Deletes everything about these users.
pub(crate) async fn delete_of_users(db: &mut PgConnection, users: &[Uuid]) -> sqlx::Result<()> {
    if users.is_empty() {
        return Ok(());
    }
    let mails = "delete from pillarbox_notify.mail where user_id = any($1)";
    for statement in DELETE_OF_USERS.into_iter().chain([mails]) {
        sqlx::query(statement).bind(users).execute(&mut *db).await?;
    }
    Ok(())
}

/// Returns up to `limit` accounts that were deleted within `recent`, after a user, by their ids.
pub(crate) async fn recently_deleted(
    db: &mut PgConnection,
    recent: TimeDelta,
    after: Uuid,
    limit: i64,
) -> sqlx::Result<Vec<Uuid>> {
    let query = "select user_id from pillarbox_notify.deleted_account
                 where deleted_at > statement_timestamp() - $1 and user_id > $2 order by user_id limit $3";
    sqlx::query_scalar(query).bind(recent).bind(after).bind(limit).fetch_all(db).await
}

/// Forgets up to `limit` accounts that were deleted longer ago than `age`. Returns how many.
pub(crate) async fn delete_old_deletions(db: &mut PgConnection, age: TimeDelta, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_notify.deleted_account where user_id in (
                     select user_id from pillarbox_notify.deleted_account
                     where deleted_at < statement_timestamp() - $1 limit $2
                 )";
    Ok(sqlx::query(query).bind(age).bind(limit).execute(db).await?.rows_affected())
}
