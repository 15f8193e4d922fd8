//! SQL of portal tokens.

use chrono::{DateTime, Utc};
use sqlx::error::BoxDynError;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::PortalToken;

pub(super) async fn insert(
    db: &mut PgConnection,
    token: &PortalToken,
    digest: [u8; 32],
    created_by: &str,
) -> sqlx::Result<()> {
    sqlx::query(
        "insert into pillarbox_admin.portal_token (id, digest, tenant, access, name, created_by, created_at, expires_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(token.id)
    .bind(digest.as_slice())
    .bind(token.tenant.as_str())
    .bind(token.access.as_str())
    .bind(&token.name)
    .bind(created_by)
    .bind(token.created_at)
    .bind(token.expires_at)
    .execute(db)
    .await
    .map(drop)
}

pub(super) async fn list(
    db: &mut PgConnection,
    tenant: &str,
    before: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<PortalToken>> {
    let rows = sqlx::query(
        "select id, tenant, access, name, created_at, expires_at from pillarbox_admin.portal_token
         where tenant = $1 and ($2::uuid is null or id < $2) and expires_at > now()
         order by id desc limit $3",
    )
    .bind(tenant)
    .bind(before)
    .bind(limit)
    .fetch_all(db)
    .await?;
    rows.iter().map(token).collect()
}

/// The name of a token, and when it expires. None if it does not exist.
pub(super) async fn name_and_expiry(
    db: &mut PgConnection,
    id: Uuid,
) -> sqlx::Result<Option<(Option<String>, Option<DateTime<Utc>>)>> {
    let query = "select name, expires_at from pillarbox_admin.portal_token where id = $1";
    sqlx::query_as(query).bind(id).fetch_optional(db).await
}

/// Deletes a token. Returns false if the tenant has no such token.
pub(super) async fn delete(db: &mut PgConnection, tenant: &str, id: Uuid) -> sqlx::Result<bool> {
    let query = "delete from pillarbox_admin.portal_token where id = $1 and tenant = $2";
    Ok(sqlx::query(query).bind(id).bind(tenant).execute(db).await?.rows_affected() > 0)
}

/// Deletes tokens some time after they have expired.
pub(super) async fn delete_expired(db: &mut PgConnection) -> sqlx::Result<()> {
    let query = "delete from pillarbox_admin.portal_token where expires_at < now() - interval '1 hour'";
    sqlx::query(query).execute(db).await.map(drop)
}

fn token(row: &PgRow) -> sqlx::Result<PortalToken> {
    Ok(PortalToken {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        tenant: row.try_get::<&str, _>("tenant")?.parse().map_err(decode_error)?,
        access: row.try_get::<&str, _>("access")?.parse().map_err(decode_error)?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
    })
}

fn decode_error(error: impl Into<BoxDynError>) -> sqlx::Error {
    sqlx::Error::Decode(error.into())
}
