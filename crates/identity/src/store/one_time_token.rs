//! Tokens that are sent by e-mail.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::TokenKind;

/// Inserts a token. It replaces the previous one of its kind.
pub(crate) async fn insert(
    db: &mut PgConnection,
    user_id: Uuid,
    kind: TokenKind,
    digest: &[u8; 32],
    expires_at: DateTime<Utc>,
) -> sqlx::Result<()> {
    let query =
        "insert into pillarbox_identity.one_time_token (user_id, kind, digest, expires_at) values ($1, $2, $3, $4)
                 on conflict (user_id, kind) do update set digest = excluded.digest, expires_at = excluded.expires_at";
    sqlx::query(query)
        .bind(user_id)
        .bind(kind.into_str())
        .bind(digest.as_slice())
        .bind(expires_at)
        .execute(db)
        .await
        .map(drop)
}

/// Returns the user of a valid token.
pub(crate) async fn find(
    db: &mut PgConnection,
    kind: TokenKind,
    digest: &[u8; 32],
    now: DateTime<Utc>,
) -> sqlx::Result<Option<Uuid>> {
    let query = "select user_id from pillarbox_identity.one_time_token
                 where kind = $1 and digest = $2 and expires_at > $3";
    sqlx::query_scalar(query).bind(kind.into_str()).bind(digest.as_slice()).bind(now).fetch_optional(db).await
}

/// Deletes a valid token and returns its user. Of two requests with the same token, one gets the user.
pub(crate) async fn consume(
    db: &mut PgConnection,
    kind: TokenKind,
    digest: &[u8; 32],
    now: DateTime<Utc>,
) -> sqlx::Result<Option<Uuid>> {
    let query = "delete from pillarbox_identity.one_time_token
                 where kind = $1 and digest = $2 and expires_at > $3 returning user_id";
    sqlx::query_scalar(query).bind(kind.into_str()).bind(digest.as_slice()).bind(now).fetch_optional(db).await
}

/// Deletes the tokens of a user.
pub(crate) async fn delete_of_user(db: &mut PgConnection, user_id: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox_identity.one_time_token where user_id = $1";
    sqlx::query(query).bind(user_id).execute(db).await.map(drop)
}
