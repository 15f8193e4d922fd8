//! SQL of API keys.

use chrono::{DateTime, Utc};
use http_kit::auth::{Caller, Principal};
use pillarbox::log::{STANDING_COLUMNS, standing_of};
use sqlx::error::BoxDynError;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::ApiKey;

const COLUMNS: &str = "id, name, hint, role, tenant, created_at, expires_at, revoked_at";

pub(super) async fn insert(db: &mut PgConnection, key: &ApiKey, digest: [u8; 32]) -> sqlx::Result<()> {
    sqlx::query(
        "insert into pillarbox_admin.api_key (id, digest, hint, name, role, tenant, created_at, expires_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(key.id)
    .bind(digest.as_slice())
    .bind(&key.hint)
    .bind(&key.name)
    .bind(key.role.as_str())
    .bind(key.tenant.as_str())
    .bind(key.created_at)
    .bind(key.expires_at)
    .execute(db)
    .await
    .map(drop)
}

/// The caller whose API key or portal token has this digest, if it is neither revoked nor expired by the database's time.
pub(super) async fn find_caller(db: &mut PgConnection, digest: [u8; 32]) -> sqlx::Result<Option<Caller>> {
    let row = sqlx::query(sqlx::AssertSqlSafe(format!(
        "select known.*, {STANDING_COLUMNS}
         from (select id, tenant as tenant_name, role, null as access from pillarbox_admin.api_key
               where digest = $1 and revoked_at is null and (expires_at is null or expires_at > now())
               union all
               select id, tenant, null, access from pillarbox_admin.portal_token
               where digest = $1 and expires_at > now()) as known
         join pillarbox.tenant on tenant.name = known.tenant_name
         where tenant.deleted_at is null"
    )))
    .bind(digest.as_slice())
    .fetch_optional(db)
    .await?;
    row.as_ref().map(caller).transpose()
}

fn caller(row: &PgRow) -> sqlx::Result<Caller> {
    let id: Uuid = row.try_get("id")?;
    let tenant = row.try_get::<&str, _>("tenant_name")?.parse().map_err(decode_error)?;
    let role = row.try_get::<Option<&str>, _>("role")?.map(str::parse).transpose().map_err(decode_error)?;
    let portal = row.try_get::<Option<&str>, _>("access")?.map(str::parse).transpose().map_err(decode_error)?;
    let principal = if portal.is_some() { Principal::Portal(id) } else { Principal::Key(id) };
    Ok(Caller { portal, standing: standing_of(row)?, ..Caller::new(principal, tenant, role) })
}

/// Lists keys older than `before`, newest first. Without a tenant: the keys of all tenants.
pub(super) async fn list(
    db: &mut PgConnection,
    tenant: Option<&str>,
    before: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<ApiKey>> {
    let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
        "select {COLUMNS} from pillarbox_admin.api_key
         where ($1::text is null or tenant = $1) and ($2::uuid is null or id < $2)
         order by id desc limit $3"
    )))
    .bind(tenant)
    .bind(before)
    .bind(limit)
    .fetch_all(db)
    .await?;
    rows.iter().map(key).collect()
}

/// Revokes a key; a second revocation does not change its time. Returns false if the key does not exist in the tenant.
pub(super) async fn revoke(db: &mut PgConnection, id: Uuid, tenant: Option<&str>) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "update pillarbox_admin.api_key set revoked_at = coalesce(revoked_at, now())
         where id = $1 and ($2::text is null or tenant = $2)",
    )
    .bind(id)
    .bind(tenant)
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// The name of a key, and when it expires. None if it does not exist.
pub(super) async fn name_and_expiry(
    db: &mut PgConnection,
    id: Uuid,
) -> sqlx::Result<Option<(String, Option<DateTime<Utc>>)>> {
    let query = "select name, expires_at from pillarbox_admin.api_key where id = $1";
    sqlx::query_as(query).bind(id).fetch_optional(db).await
}

/// Whether a valid admin key of the tenant `main` exists.
pub(super) async fn has_admin_key(db: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (
             select from pillarbox_admin.api_key
             where role = 'admin' and tenant = 'main' and revoked_at is null and (expires_at is null or expires_at > now()))",
    )
    .fetch_one(db)
    .await
}

/// Inserts the row of the installation if there is none, locks it and returns its fingerprint. The lock serialises concurrent
/// first starts.
pub(super) async fn lock_installation(db: &mut PgConnection, fingerprint: &str) -> sqlx::Result<String> {
    sqlx::query(
        "insert into pillarbox_admin.installation (secret_key_fingerprint, created_at)
         values ($1, now()) on conflict do nothing",
    )
    .bind(fingerprint)
    .execute(&mut *db)
    .await?;
    sqlx::query_scalar("select secret_key_fingerprint from pillarbox_admin.installation for update").fetch_one(db).await
}

/// Whether the table of the installation exists, which a migration creates.
pub(super) async fn has_installations(db: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar("select to_regclass('pillarbox_admin.installation') is not null").fetch_one(db).await
}

pub(super) async fn fingerprint(db: &mut PgConnection) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar("select secret_key_fingerprint from pillarbox_admin.installation").fetch_optional(db).await
}

pub(super) async fn set_fingerprint(db: &mut PgConnection, fingerprint: &str) -> sqlx::Result<()> {
    sqlx::query("update pillarbox_admin.installation set secret_key_fingerprint = $1")
        .bind(fingerprint)
        .execute(db)
        .await
        .map(drop)
}

fn key(row: &PgRow) -> sqlx::Result<ApiKey> {
    Ok(ApiKey {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        hint: row.try_get("hint")?,
        role: row.try_get::<&str, _>("role")?.parse().map_err(decode_error)?,
        tenant: row.try_get::<&str, _>("tenant")?.parse().map_err(decode_error)?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
        revoked_at: row.try_get("revoked_at")?,
    })
}

fn decode_error(error: impl Into<BoxDynError>) -> sqlx::Error {
    sqlx::Error::Decode(error.into())
}
