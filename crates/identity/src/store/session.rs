//! Sessions and their refresh tokens.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::{PresentedToken, Session, SessionView};

/// The number of replaced tokens that are remembered for each session.
const REPLACED_MAX: i64 = 1_000;

pub(crate) async fn insert(db: &mut PgConnection, new: &Session) -> sqlx::Result<()> {
    let query = "insert into pillarbox_identity.session (id, user_id, user_agent, created_at, last_used_at, expires_at)
                 values ($1, $2, $3, $4, $4, $5)";
    sqlx::query(query)
        .bind(new.id)
        .bind(new.user_id)
        .bind(&new.user_agent)
        .bind(new.created_at)
        .bind(new.expires_at)
        .execute(db)
        .await
        .map(drop)
}

/// Deletes the oldest sessions of a user above this number. Returns their ids.
pub(crate) async fn delete_oldest(db: &mut PgConnection, user_id: Uuid, sessions_max: i64) -> sqlx::Result<Vec<Uuid>> {
    let query = "delete from pillarbox_identity.session where id in
                     (select id from pillarbox_identity.session where user_id = $1
                      order by created_at desc, id desc offset $2)
                 returning id";
    sqlx::query_scalar(query).bind(user_id).bind(sessions_max).fetch_all(db).await
}

/// Deletes the sessions of a user. Returns their ids.
pub(crate) async fn delete_of_user(db: &mut PgConnection, user_id: Uuid) -> sqlx::Result<Vec<Uuid>> {
    let query = "delete from pillarbox_identity.session where user_id = $1 returning id";
    sqlx::query_scalar(query).bind(user_id).fetch_all(db).await
}

/// Deletes a session of the user. Returns false if there is none.
pub(crate) async fn delete(db: &mut PgConnection, user_id: Uuid, id: Uuid) -> sqlx::Result<bool> {
    let query = "delete from pillarbox_identity.session where user_id = $1 and id = $2";
    Ok(sqlx::query(query).bind(user_id).bind(id).execute(db).await?.rows_affected() > 0)
}

/// The live sessions of a user, newest first.
pub(crate) async fn list(
    db: &mut PgConnection,
    user_id: Uuid,
    now: DateTime<Utc>,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> sqlx::Result<Vec<SessionView>> {
    let query = "select id, user_id, user_agent, created_at, last_used_at, expires_at from pillarbox_identity.session
                 where user_id = $1 and expires_at > $2 and ($3::timestamptz is null or (created_at, id) < ($3, $4))
                 order by created_at desc, id desc limit $5";
    sqlx::query_as(query)
        .bind(user_id)
        .bind(now)
        .bind(before.map(|(at, _)| at))
        .bind(before.map(|(_, id)| id))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await
}

/// Locks the session that a refresh token belongs to. None if the token is unknown, or its session has ended.
pub(crate) async fn lock_by_token(db: &mut PgConnection, digest: &[u8; 32]) -> sqlx::Result<Option<Session>> {
    let query = "select id, user_id, user_agent, created_at, expires_at from pillarbox_identity.session
                 where id = (select session_id from pillarbox_identity.refresh_token where digest = $1) for update";
    sqlx::query_as(query).bind(digest.as_slice()).fetch_optional(db).await
}

/// Reads a refresh token of a locked session. It must be a separate statement: the one that waited for the lock does not
/// see what the previous owner of the lock has committed.
pub(crate) async fn find_token(
    db: &mut PgConnection,
    digest: &[u8; 32],
    session_id: Uuid,
) -> sqlx::Result<Option<PresentedToken>> {
    let query = "select expires_at, replaced_at,
                     exists (select from pillarbox_identity.refresh_token child
                             where child.session_id = $2 and child.parent = $1 and child.replaced_at is null) as is_parent_of_current
                 from pillarbox_identity.refresh_token where digest = $1 and session_id = $2";
    sqlx::query_as(query).bind(digest.as_slice()).bind(session_id).fetch_optional(db).await
}

/// Replaces the current token of a session, and forgets the oldest ones.
pub(crate) async fn replace_current(db: &mut PgConnection, session_id: Uuid, now: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "update pillarbox_identity.refresh_token set replaced_at = $2
                 where session_id = $1 and replaced_at is null";
    sqlx::query(query).bind(session_id).bind(now).execute(&mut *db).await?;
    let query = "delete from pillarbox_identity.refresh_token where session_id = $1 and replaced_at <=
                     (select replaced_at from pillarbox_identity.refresh_token
                      where session_id = $1 and replaced_at is not null order by replaced_at desc offset $2 limit 1)";
    sqlx::query(query).bind(session_id).bind(REPLACED_MAX).execute(&mut *db).await?;
    let query = "update pillarbox_identity.session set last_used_at = $2 where id = $1";
    sqlx::query(query).bind(session_id).bind(now).execute(db).await.map(drop)
}

/// Inserts the current token of a session.
pub(crate) async fn insert_token(
    db: &mut PgConnection,
    session_id: Uuid,
    digest: &[u8; 32],
    parent: Option<&[u8; 32]>,
    expires_at: DateTime<Utc>,
) -> sqlx::Result<()> {
    let query = "insert into pillarbox_identity.refresh_token (digest, session_id, parent, expires_at)
                 values ($1, $2, $3, $4)";
    sqlx::query(query)
        .bind(digest.as_slice())
        .bind(session_id)
        .bind(parent.map(<[u8; 32]>::as_slice))
        .bind(expires_at)
        .execute(db)
        .await
        .map(drop)
}
