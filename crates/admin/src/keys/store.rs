//! SQL of API keys.

use chrono::{DateTime, Utc};
use http_kit::auth::{Caller, PortalAccess, Principal, Role};
use pillarbox::log::{STANDING_COLUMNS, Tenant, standing_of};
use sqlx::postgres::PgRow;
use sqlx::{Error, FromRow, PgConnection};
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

/// A valid API key, which has a role, or a portal token, which has an access.
#[derive(sqlx::FromRow)]
struct Credential {
    id: Uuid,
    #[sqlx(try_from = "String")]
    tenant_name: Tenant,
    role: Option<String>,
    access: Option<String>,
}

fn caller(row: &PgRow) -> sqlx::Result<Caller> {
    let Credential { id, tenant_name, role, access } = Credential::from_row(row)?;
    let role = role.as_deref().map(str::parse::<Role>).transpose().map_err(|error| Error::Decode(error.into()))?;
    let portal =
        access.as_deref().map(str::parse::<PortalAccess>).transpose().map_err(|error| Error::Decode(error.into()))?;
    let principal = if portal.is_some() { Principal::Portal(id) } else { Principal::Key(id) };
    Ok(Caller { portal, standing: standing_of(row)?, ..Caller::new(principal, tenant_name, role) })
}

/// Lists keys older than `before`, newest first. Without a tenant: the keys of all tenants.
pub(super) async fn list(
    db: &mut PgConnection,
    tenant: Option<&str>,
    before: Option<Uuid>,
    limit: i64,
) -> sqlx::Result<Vec<ApiKey>> {
    sqlx::query_as(sqlx::AssertSqlSafe(format!(
        "select {COLUMNS} from pillarbox_admin.api_key
         where ($1::text is null or tenant = $1) and ($2::uuid is null or id < $2)
         order by id desc limit $3"
    )))
    .bind(tenant)
    .bind(before)
    .bind(limit)
    .fetch_all(db)
    .await
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

/// The row of the installation.
#[derive(sqlx::FromRow)]
pub(super) struct Installation {
    pub(super) id: Uuid,
    pub(super) secret_key_fingerprint: String,
}

/// Stores the fingerprint if there is none, and returns the row. The lock of the update serialises concurrent first starts.
pub(super) async fn lock_installation(db: &mut PgConnection, fingerprint: &str) -> sqlx::Result<Installation> {
    sqlx::query_as(
        "update pillarbox_admin.installation set secret_key_fingerprint = coalesce(secret_key_fingerprint, $1)
         returning id, secret_key_fingerprint",
    )
    .bind(fingerprint)
    .fetch_one(db)
    .await
}

/// Whether the table of the installation exists, which a migration creates.
pub(super) async fn has_installations(db: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar("select to_regclass('pillarbox_admin.installation') is not null").fetch_one(db).await
}

pub(super) async fn fingerprint(db: &mut PgConnection) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar("select secret_key_fingerprint from pillarbox_admin.installation").fetch_one(db).await
}

pub(super) async fn installation_id(db: &mut PgConnection) -> sqlx::Result<Uuid> {
    sqlx::query_scalar("select id from pillarbox_admin.installation").fetch_one(db).await
}

pub(super) async fn set_fingerprint(db: &mut PgConnection, fingerprint: &str) -> sqlx::Result<()> {
    sqlx::query("update pillarbox_admin.installation set secret_key_fingerprint = $1")
        .bind(fingerprint)
        .execute(db)
        .await
        .map(drop)
}
