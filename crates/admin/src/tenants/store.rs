//! SQL of tenants.

use std::collections::BTreeMap;

use pillarbox::log::{InvalidTenant, Tenant, TenantStanding};
use pillarbox::log::{STANDING_COLUMNS, standing_of};
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};

use super::{TenantFilter, TenantRecord};

const COLUMNS: &str =
    "name, display_name, metadata, subscribers_max, events_per_second_max, payload_bytes_max, suspended_at,
    version, created_at, updated_at";

/// Inserts a tenant. Returns None if the name is in use.
pub(super) async fn insert(db: &mut PgConnection, new: &TenantRecord) -> sqlx::Result<Option<TenantRecord>> {
    let row = sqlx::query(sqlx::AssertSqlSafe(format!(
        "insert into pillarbox.tenant
             (name, display_name, metadata, subscribers_max, events_per_second_max, payload_bytes_max, created_at, updated_at)
         values ($1, $2, $3, $4, $5, $6, $7, $7) on conflict do nothing returning {COLUMNS}"
    )))
    .bind(new.name.as_str())
    .bind(&new.display_name)
    .bind(Json(&new.metadata))
    .bind(new.subscribers_max)
    .bind(new.events_per_second_max)
    .bind(new.payload_bytes_max)
    .bind(new.created_at)
    .fetch_optional(db)
    .await?;
    row.as_ref().map(tenant).transpose()
}

/// Whether the name belongs to a deleted tenant.
pub(super) async fn is_deleted(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<bool> {
    sqlx::query_scalar("select exists (select from pillarbox.tenant where name = $1 and deleted_at is not null)")
        .bind(name.as_str())
        .fetch_one(db)
        .await
}

pub(super) async fn find(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<Option<TenantRecord>> {
    find_with(db, name, "").await
}

/// Returns the tenant and locks its row until the end of the transaction.
pub(super) async fn lock(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<Option<TenantRecord>> {
    find_with(db, name, "for update").await
}

async fn find_with(db: &mut PgConnection, name: &Tenant, lock: &str) -> sqlx::Result<Option<TenantRecord>> {
    let query = format!("select {COLUMNS} from pillarbox.tenant where name = $1 and deleted_at is null {lock}");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(name.as_str()).fetch_optional(db).await?;
    row.as_ref().map(tenant).transpose()
}

/// Returns tenants in the order of their names, those after the given one.
pub(super) async fn list(
    db: &mut PgConnection,
    filter: &TenantFilter,
    after: Option<&str>,
    limit: i64,
) -> sqlx::Result<Vec<TenantRecord>> {
    let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
        "select {COLUMNS} from pillarbox.tenant
         where deleted_at is null and ($1::boolean is null or (suspended_at is not null) = $1)
           and ($2::text is null or name > $2)
           and ($4::text is null or strpos(lower(name), lower($4)) > 0 or strpos(lower(display_name), lower($4)) > 0)
         order by name limit $3"
    )))
    .bind(filter.is_suspended)
    .bind(after)
    .bind(limit)
    .bind(&filter.name)
    .fetch_all(db)
    .await?;
    rows.iter().map(tenant).collect()
}

/// Updates every column but the name and the time of the creation.
pub(super) async fn update(db: &mut PgConnection, changed: &TenantRecord) -> sqlx::Result<()> {
    sqlx::query(
        "update pillarbox.tenant
         set display_name = $2, metadata = $3, subscribers_max = $4, events_per_second_max = $5, payload_bytes_max = $6,
             suspended_at = $7, version = $8, updated_at = $9
         where name = $1",
    )
    .bind(changed.name.as_str())
    .bind(&changed.display_name)
    .bind(Json(&changed.metadata))
    .bind(changed.subscribers_max)
    .bind(changed.events_per_second_max)
    .bind(changed.payload_bytes_max)
    .bind(changed.suspended_at)
    .bind(changed.version)
    .bind(changed.updated_at)
    .execute(db)
    .await
    .map(drop)
}

/// Marks the tenant as deleted, and deletes its API keys and portal tokens.
pub(super) async fn delete(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<()> {
    delete_access(db, name).await?;
    let query = "update pillarbox.tenant set deleted_at = now(), display_name = null, metadata = '{}' where name = $1";
    sqlx::query(query).bind(name.as_str()).execute(db).await.map(drop)
}

async fn delete_access(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<u64> {
    let mut deleted = 0;
    for table in ["api_key", "portal_token"] {
        let query = format!("delete from pillarbox_admin.{table} where tenant = $1");
        let done = sqlx::query(sqlx::AssertSqlSafe(query)).bind(name.as_str()).execute(&mut *db).await?;
        deleted += done.rows_affected();
    }
    Ok(deleted)
}

/// Deletes the keys and portal tokens of a deleted tenant, and at most `limit` dead letters of the consumers of the log. Returns
/// how many rows there were.
pub(super) async fn delete_rows(db: &mut PgConnection, name: &Tenant, limit: i64) -> sqlx::Result<u64> {
    let deleted = delete_access(db, name).await?;
    let query = "delete from pillarbox.dead_letter
                 where id in (select id from pillarbox.dead_letter where tenant = $1 limit $2)";
    let done = sqlx::query(query).bind(name.as_str()).bind(limit).execute(db).await?;
    Ok(deleted + done.rows_affected())
}

/// The names of some deleted tenants, and whether only their messages are left. Those with more come first.
pub(super) async fn deleted(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<(Tenant, bool)>> {
    let query = "select name, emptied_at is not null as is_emptied from pillarbox.tenant where deleted_at is not null
                 order by is_emptied, deleted_at limit $1";
    let rows = sqlx::query(query).bind(limit).fetch_all(db).await?;
    rows.iter().map(|row| Ok((name_of(row)?, row.try_get("is_emptied")?))).collect()
}

/// Records that everything of a deleted tenant is deleted, except its messages.
pub(super) async fn set_emptied(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<()> {
    let query = "update pillarbox.tenant set emptied_at = now() where name = $1 and deleted_at is not null";
    sqlx::query(query).bind(name.as_str()).execute(db).await.map(drop)
}

/// Whether the log has no message from before the deletion of the tenant any more. The cost does not depend on the number of
/// messages: the log is partitioned by day.
pub(super) async fn is_log_without(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<bool> {
    let query = "select not exists (select from pillarbox.log where at <= (select deleted_at from pillarbox.tenant
                                                                           where name = $1 and deleted_at is not null))";
    sqlx::query_scalar(query).bind(name.as_str()).fetch_one(db).await
}

/// Removes the row of a deleted tenant, so that its name is free.
pub(super) async fn remove(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<()> {
    let query = "delete from pillarbox.tenant where name = $1 and deleted_at is not null";
    sqlx::query(query).bind(name.as_str()).execute(db).await.map(drop)
}

pub(super) async fn standing(db: &mut PgConnection, name: &Tenant) -> sqlx::Result<Option<TenantStanding>> {
    let query = format!("select {STANDING_COLUMNS} from pillarbox.tenant where name = $1 and deleted_at is null");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(name.as_str()).fetch_optional(db).await?;
    row.as_ref().map(standing_of).transpose()
}

/// The number of processes that have sent a heartbeat within their lease.
pub(super) async fn count_processes(db: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("select count(*) from pillarbox.replica where until > now()").fetch_one(db).await
}

fn name_of(row: &PgRow) -> sqlx::Result<Tenant> {
    row.try_get::<&str, _>("name")?.parse().map_err(|error: InvalidTenant| sqlx::Error::Decode(error.into()))
}

fn tenant(row: &PgRow) -> sqlx::Result<TenantRecord> {
    let Json(metadata): Json<BTreeMap<String, String>> = row.try_get("metadata")?;
    Ok(TenantRecord {
        name: name_of(row)?,
        display_name: row.try_get("display_name")?,
        metadata,
        subscribers_max: row.try_get("subscribers_max")?,
        events_per_second_max: row.try_get("events_per_second_max")?,
        payload_bytes_max: row.try_get("payload_bytes_max")?,
        suspended_at: row.try_get("suspended_at")?,
        version: row.try_get("version")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}
