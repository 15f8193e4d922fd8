//! Rows that have expired, in batches.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

/// Each deletes up to $2 rows that expired before $1.
const DELETIONS: [&str; 4] = [
    "delete from pillarbox_identity.session where id in
         (select id from pillarbox_identity.session where expires_at <= $1 order by expires_at limit $2)",
    // A session without a token that could be exchanged has ended. Replaced tokens are deleted with their session only: a
    // copy that is presented late reveals a theft as well.
    "delete from pillarbox_identity.session where id in
         (select session_id from pillarbox_identity.refresh_token
          where replaced_at is null and expires_at <= $1 order by expires_at limit $2)",
    "delete from pillarbox_identity.one_time_token where digest in
         (select digest from pillarbox_identity.one_time_token where expires_at <= $1 order by expires_at limit $2)",
    "delete from pillarbox_identity.throttle where (kind, subject, window_no) in
         (select kind, subject, window_no from pillarbox_identity.throttle where expires_at <= $1
          order by expires_at limit $2)",
];

/// Deletes expired sessions, tokens and counts. Returns the largest number of rows of one kind.
pub(crate) async fn delete(db: &mut PgConnection, now: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
    let mut most = 0;
    for query in DELETIONS {
        most = most.max(sqlx::query(query).bind(now).bind(limit).execute(&mut *db).await?.rows_affected());
    }
    Ok(most)
}

/// Deletes networks that were not used since this time.
pub(crate) async fn delete_networks(db: &mut PgConnection, before: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_identity.known_network where (user_id, network) in
                     (select user_id, network from pillarbox_identity.known_network where last_used_at <= $1
                      order by last_used_at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(limit).execute(db).await?.rows_affected())
}

/// Accounts that were created before this time and never verified.
pub(crate) async fn unverified(db: &mut PgConnection, before: DateTime<Utc>, limit: i64) -> sqlx::Result<Vec<Uuid>> {
    let query = "select id from pillarbox_identity.account where verified_at is null and created_at <= $1
                 order by created_at limit $2 for update skip locked";
    sqlx::query_scalar(query).bind(before).bind(limit).fetch_all(db).await
}
