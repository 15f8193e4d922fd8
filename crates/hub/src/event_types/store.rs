//! SQL for the catalogue of event types.

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use serde_json::value::RawValue;
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use crate::event_types::cache::AppliedVersion;
use crate::event_types::domain::{CatalogueSettings, EventType, TypeVersion};

/// The stamp of all catalogues, another one after each change.
pub(crate) async fn stamp(db: &mut PgConnection) -> sqlx::Result<Uuid> {
    sqlx::query_scalar("select stamp from pillarbox_hub.catalogue_stamp").fetch_one(db).await
}

/// A catalogue without its types.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct Catalogue {
    #[sqlx(try_from = "String")]
    pub(crate) tenant: Tenant,
    #[sqlx(flatten)]
    pub(crate) settings: CatalogueSettings,
    pub(crate) stamp: Uuid,
}

/// The catalogues of all tenants.
pub(crate) async fn catalogues(db: &mut PgConnection) -> sqlx::Result<Vec<Catalogue>> {
    let query = "select tenant, unknown_types, is_shared, stamp from pillarbox_hub.catalogue";
    sqlx::query_as(query).fetch_all(db).await
}

/// The catalogue that applies to a tenant: its own, or else the shared one. None: neither exists.
pub(crate) async fn find_applied(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<Option<Catalogue>> {
    let query = "select tenant, unknown_types, is_shared, stamp from pillarbox_hub.catalogue
                 where tenant = $1 or is_shared order by tenant = $1 desc limit 1";
    sqlx::query_as(query).bind(tenant.as_str()).fetch_optional(db).await
}

/// The stamp of a tenant's catalogue. None: it has none.
pub(crate) async fn stamp_of(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<Option<Uuid>> {
    let query = "select stamp from pillarbox_hub.catalogue where tenant = $1";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_optional(db).await
}

/// Like [`stamp_of`], and locks the catalogue, if it exists, until the end of the transaction.
pub(crate) async fn lock_stamp(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<Option<Uuid>> {
    let query = "select stamp from pillarbox_hub.catalogue where tenant = $1 for update";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_optional(db).await
}

/// Locks the catalogue of a tenant until the end of the transaction, and creates it if it does not exist. Returns its settings.
pub(crate) async fn lock(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<CatalogueSettings> {
    let query = "insert into pillarbox_hub.catalogue (tenant, stamp) values ($1, $2)
                 on conflict (tenant) do update set stamp = excluded.stamp returning unknown_types, is_shared";
    sqlx::query_as(query).bind(tenant.as_str()).bind(Uuid::new_v4()).fetch_one(db).await
}

pub(crate) async fn save_settings(
    db: &mut PgConnection,
    tenant: &Tenant,
    settings: CatalogueSettings,
) -> sqlx::Result<()> {
    let query = "update pillarbox_hub.catalogue set unknown_types = $2, is_shared = $3 where tenant = $1";
    let unknown_types: &'static str = settings.unknown_types.into();
    let query = sqlx::query(query).bind(tenant.as_str()).bind(unknown_types).bind(settings.is_shared);
    query.execute(db).await.map(drop)
}

/// Deletes the catalogue of a tenant, which has no types.
pub(crate) async fn delete_settings(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.catalogue where tenant = $1";
    sqlx::query(query).bind(tenant.as_str()).execute(db).await.map(drop)
}

/// Sets another stamp of all catalogues. The last statement of a change: other changes wait for its row.
pub(crate) async fn set_stamp(db: &mut PgConnection) -> sqlx::Result<()> {
    let query = "update pillarbox_hub.catalogue_stamp set stamp = $1";
    sqlx::query(query).bind(Uuid::new_v4()).execute(db).await.map(drop)
}

/// The types of a tenant, each with the version that payloads are checked against.
pub(crate) async fn known_types(
    db: &mut PgConnection,
    tenant: &Tenant,
) -> sqlx::Result<Vec<(String, Option<AppliedVersion>)>> {
    let query = "select event_type.name, newest.version, newest.created_at
                 from pillarbox_hub.event_type left join pillarbox_hub.event_type_version as newest
                     on newest.tenant = event_type.tenant and newest.name = event_type.name
                        and newest.version = event_type.newest and event_type.is_enforced
                 where event_type.tenant = $1";
    let rows: Vec<(String, Option<i32>, Option<DateTime<Utc>>)> =
        sqlx::query_as(query).bind(tenant.as_str()).fetch_all(db).await?;
    let known = |(name, version, since): (_, Option<i32>, Option<_>)| {
        (name, version.zip(since).map(|(version, since)| AppliedVersion { version, since }))
    };
    Ok(rows.into_iter().map(known).collect())
}

/// The newest version of a type that existed at some time. None: there was none.
pub(crate) async fn version_at(
    db: &mut PgConnection,
    tenant: &Tenant,
    name: &str,
    at: DateTime<Utc>,
) -> sqlx::Result<Option<i32>> {
    let query = "select max(version) from pillarbox_hub.event_type_version
                 where tenant = $1 and name = $2 and created_at <= $3";
    sqlx::query_scalar(query).bind(tenant.as_str()).bind(name).bind(at).fetch_one(db).await
}

/// The schema of a version.
pub(crate) async fn schema(
    db: &mut PgConnection,
    tenant: &Tenant,
    name: &str,
    version: i32,
) -> sqlx::Result<Option<Box<RawValue>>> {
    let query = "select schema from pillarbox_hub.event_type_version where tenant = $1 and name = $2 and version = $3";
    let query = sqlx::query_scalar(query).bind(tenant.as_str()).bind(name).bind(version);
    Ok(query.fetch_optional(db).await?.map(|Json(schema)| schema))
}

/// What the versions of a tenant occupy.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub(crate) struct CatalogueSize {
    /// The schemas and examples of all versions.
    pub(crate) stored_bytes: i64,
    /// The newest schemas of all types, compiled.
    pub(crate) compiled_bytes: i64,
}

pub(crate) async fn size(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<CatalogueSize> {
    let query = "select coalesce(sum(stored.bytes), 0)::bigint as stored_bytes,
                     coalesce(sum(stored.compiled_bytes) filter (where stored.version = event_type.newest), 0)::bigint
                         as compiled_bytes
                 from pillarbox_hub.event_type_version as stored join pillarbox_hub.event_type using (tenant, name)
                 where tenant = $1";
    sqlx::query_as(query).bind(tenant.as_str()).fetch_one(db).await
}

/// Bytes of the schemas and examples of all versions of a type.
pub(crate) async fn type_bytes(db: &mut PgConnection, tenant: &Tenant, name: &str) -> sqlx::Result<i64> {
    let query = "select coalesce(sum(bytes), 0)::bigint from pillarbox_hub.event_type_version
                 where tenant = $1 and name = $2";
    sqlx::query_scalar(query).bind(tenant.as_str()).bind(name).fetch_one(db).await
}

const COLUMNS: &str = "name, description, is_deprecated, is_enforced, newest, version, created_at, updated_at";

/// Returns types in the order of their names, those after `after`.
pub(crate) async fn list(
    db: &mut PgConnection,
    tenant: &Tenant,
    after: Option<&str>,
    limit: i64,
) -> sqlx::Result<Vec<EventType>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.event_type where tenant = $1 and ($2::text is null or name > $2)
         order by name limit $3"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(after).bind(limit).fetch_all(db).await
}

/// The names of all types of a tenant, in their order.
pub(crate) async fn names(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<Vec<String>> {
    let query = "select name from pillarbox_hub.event_type where tenant = $1 order by name";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_all(db).await
}

pub(crate) async fn find(db: &mut PgConnection, tenant: &Tenant, name: &str) -> sqlx::Result<Option<EventType>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.event_type where tenant = $1 and name = $2");
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(name).fetch_optional(db).await
}

pub(crate) async fn count(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<i64> {
    let query = "select count(*) from pillarbox_hub.event_type where tenant = $1";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_one(db).await
}

/// Inserts the type, or updates every column of it.
pub(crate) async fn save(db: &mut PgConnection, tenant: &Tenant, saved: &EventType) -> sqlx::Result<()> {
    let query = "insert into pillarbox_hub.event_type
                     (tenant, name, description, is_deprecated, is_enforced, newest, version, created_at, updated_at)
                 values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
                 on conflict (tenant, name) do update
                 set description = excluded.description, is_deprecated = excluded.is_deprecated,
                     is_enforced = excluded.is_enforced, newest = excluded.newest, version = excluded.version,
                     updated_at = excluded.updated_at";
    sqlx::query(query)
        .bind(tenant.as_str())
        .bind(&saved.name)
        .bind(&saved.description)
        .bind(saved.is_deprecated)
        .bind(saved.is_enforced)
        .bind(saved.newest)
        .bind(saved.version)
        .bind(saved.created_at)
        .bind(saved.updated_at)
        .execute(db)
        .await
        .map(drop)
}

/// Deletes a type with its versions. Returns whether it existed.
pub(crate) async fn delete(db: &mut PgConnection, tenant: &Tenant, name: &str) -> sqlx::Result<bool> {
    let query = "delete from pillarbox_hub.event_type where tenant = $1 and name = $2";
    Ok(sqlx::query(query).bind(tenant.as_str()).bind(name).execute(db).await?.rows_affected() > 0)
}

pub(crate) async fn insert_version(
    db: &mut PgConnection,
    tenant: &Tenant,
    name: &str,
    new: &TypeVersion,
    compiled_bytes: usize,
) -> sqlx::Result<()> {
    let query = "insert into pillarbox_hub.event_type_version
                     (tenant, name, version, schema, examples, created_at, compiled_bytes)
                 values ($1, $2, $3, $4::json, $5::json, $6, $7)";
    // As text: jsonb would change it.
    let examples = serde_json::to_string(&new.examples).map_err(|error| sqlx::Error::Encode(error.into()))?;
    sqlx::query(query)
        .bind(tenant.as_str())
        .bind(name)
        .bind(new.version)
        .bind(new.schema.get())
        .bind(examples)
        .bind(new.created_at)
        .bind(compiled_bytes as i32)
        .execute(db)
        .await
        .map(drop)
}

const VERSION_COLUMNS: &str = "version, schema, examples, created_at";

/// The versions of a type, oldest first.
pub(crate) async fn versions(db: &mut PgConnection, tenant: &Tenant, name: &str) -> sqlx::Result<Vec<TypeVersion>> {
    let query = format!(
        "select {VERSION_COLUMNS} from pillarbox_hub.event_type_version where tenant = $1 and name = $2 order by version"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(name).fetch_all(db).await
}

/// One version of a type.
pub(crate) async fn find_version(
    db: &mut PgConnection,
    tenant: &Tenant,
    name: &str,
    version: i32,
) -> sqlx::Result<Option<TypeVersion>> {
    let query = format!(
        "select {VERSION_COLUMNS} from pillarbox_hub.event_type_version where tenant = $1 and name = $2 and version = $3"
    );
    let query = sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(name).bind(version);
    query.fetch_optional(db).await
}
