//! Use cases of tenants, one transaction each.

use std::time::Duration;

use chrono::{DateTime, Utc};
use http_kit::etag::IfMatch;
use pillarbox::database::{Database, time};
use pillarbox::log::{Tenant, TenantStanding};
use runtime::worker::Round;
use service::DeletedRows;
use sqlx::{PgConnection, PgPool};
use tokio::time::Instant;

use super::{Error, TenantFields, TenantFilter, TenantRecord, store};
use crate::keys::CACHE_TIME;

/// Deleted tenants that one round of the maintenance works on.
const DELETED_TENANTS_MAX: i64 = 100;
/// Rows of a deleted tenant that one statement deletes.
const DELETED_ROWS_MAX: i64 = 5_000;

/// Creates a tenant. Fails if a field is invalid or the name is in use.
pub(crate) async fn create(db: &mut PgConnection, name: Tenant, fields: TenantFields) -> Result<TenantRecord, Error> {
    let now = time::now(db).await?;
    let mut new = defaults(name, now);
    fields.apply(&mut new, true)?;
    match store::insert(db, &new).await? {
        Some(created) => {
            tracing::info!(tenant = created.name.as_str(), "created a tenant");
            Ok(created)
        }
        None if store::is_deleted(db, &new.name).await? => Err(Error::NameInUse(new.name.into())),
        None => Err(Error::Exists(new.name.into())),
    }
}

fn defaults(name: Tenant, now: DateTime<Utc>) -> TenantRecord {
    TenantRecord {
        name,
        display_name: None,
        metadata: Default::default(),
        subscribers_max: None,
        events_per_second_max: None,
        payload_bytes_max: None,
        suspended_at: None,
        version: 1,
        created_at: now,
        updated_at: now,
    }
}

/// Returns a tenant.
pub(crate) async fn show(db: &Database, name: &Tenant) -> Result<TenantRecord, Error> {
    store::find(&mut *db.acquire().await?, name).await?.ok_or(Error::NotFound)
}

/// Returns tenants in the order of their names, those after the given one.
pub(crate) async fn list(
    db: &Database,
    filter: &TenantFilter,
    after: Option<&str>,
    limit: u32,
) -> Result<Vec<TenantRecord>, Error> {
    Ok(store::list(&mut *db.acquire().await?, filter, after, i64::from(limit)).await?)
}

/// Changes the given fields. Fails if one of them is invalid.
pub(crate) async fn update(
    db: &mut PgConnection,
    name: &Tenant,
    if_match: &IfMatch,
    fields: TenantFields,
) -> Result<TenantRecord, Error> {
    let mut tenant = lock(db, name, if_match).await?;
    let old = tenant.clone();
    fields.apply(&mut tenant, false)?;
    if tenant != old {
        save(db, &mut tenant).await?;
        if tenant.payload_bytes_max != old.payload_bytes_max {
            hub::payload_limit_changed(db).await?;
        }
    }
    Ok(tenant)
}

/// Suspends or resumes a tenant. A tenant that already is in this state stays unchanged. Fails for `main`.
pub(crate) async fn set_suspended(
    db: &mut PgConnection,
    name: &Tenant,
    if_match: &IfMatch,
    is_suspended: bool,
) -> Result<TenantRecord, Error> {
    let mut tenant = lock(db, name, if_match).await?;
    if *name == Tenant::main() {
        return Err(Error::Main);
    }
    if tenant.suspended_at.is_some() != is_suspended {
        tenant.suspended_at = if is_suspended { Some(time::now(db).await?) } else { None };
        save(db, &mut tenant).await?;
        hub::tenant_changed(db).await?;
        tracing::info!(tenant = name.as_str(), is_suspended, "changed whether a tenant is suspended");
    }
    Ok(tenant)
}

/// Deletes a suspended tenant with its keys, portal tokens, subscribers, streams, replays and event types. What may be many rows,
/// such as dead letters, and what other services have of it, is deleted later, by [`remove_deleted`]; until then it is out of
/// reach.
pub(crate) async fn delete(db: &mut PgConnection, name: &Tenant, if_match: &IfMatch) -> Result<(), Error> {
    let tenant = lock(db, name, if_match).await?;
    if *name == Tenant::main() {
        return Err(Error::Main);
    }
    if tenant.suspended_at.is_none() {
        return Err(Error::NotSuspended);
    }
    hub::delete_tenant(db, name).await?;
    store::delete(db, name).await?;
    tracing::info!(tenant = name.as_str(), "deleted a tenant");
    Ok(())
}

async fn lock(db: &mut PgConnection, name: &Tenant, if_match: &IfMatch) -> Result<TenantRecord, Error> {
    let tenant = store::lock(db, name).await?.ok_or(Error::NotFound)?;
    if_match.check(tenant.version, tenant.updated_at).map_err(Error::Stale)?;
    Ok(tenant)
}

async fn save(db: &mut PgConnection, tenant: &mut TenantRecord) -> Result<(), Error> {
    tenant.version += 1;
    tenant.updated_at = time::now(db).await?;
    Ok(store::update(db, tenant).await?)
}

/// How a change of a tenant reaches other processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Propagation {
    /// How long a process may send without a heartbeat.
    pub(crate) lease_time: Duration,
    /// How long to wait for dispatchers at most.
    pub(crate) time_max: Duration,
}

/// Waits until a committed suspension, resumption or deletion holds everywhere: no dispatcher sends by the former state, and
/// no process uses a cached key that it read before. Returns false if that cannot be confirmed in time.
pub(crate) async fn wait_until_effective(db: &Database, propagation: Propagation) -> bool {
    let expired_at = Instant::now() + CACHE_TIME;
    let Propagation { lease_time, time_max } = propagation;
    let is_applied = hub::wait_until_applied(db, lease_time, time_max).await;
    let processes = async { store::count_processes(&mut *db.acquire().await?).await };
    match processes.await {
        // This process has dropped its own copies.
        Ok(count) if count <= 1 => {}
        // Other processes look a key up again when their copy expires. It is shorter than asking them.
        Ok(_) | Err(_) => tokio::time::sleep_until(expired_at).await,
    }
    is_applied
}

/// Returns what the operator has decided about a tenant; None if there is no such tenant.
pub(crate) async fn standing(db: &Database, name: &Tenant) -> Result<Option<TenantStanding>, sqlx::Error> {
    store::standing(&mut *db.acquire().await?, name).await
}

/// How a service deletes what a deleted tenant has in its tables: `Service::delete_tenant_rows`.
pub type DeleteTenantRows = for<'a> fn(&'a mut PgConnection, &'a Tenant, i64) -> DeletedRows<'a>;

/// Deletes what deleted tenants still have, in steps, and their names as soon as the log has none of their messages.
///
/// Everything is deleted twice: at once, and again before the name becomes free, because a request that was in progress during the
/// deletion may have added a row. In between, only the log is checked.
pub(crate) async fn remove_deleted(db: &PgPool, services: &[DeleteTenantRows]) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    let mut round = Round::Idle;
    for store::DeletedTenant { name, is_emptied } in store::deleted(&mut db, DELETED_TENANTS_MAX).await? {
        if is_emptied && !store::is_log_without(&mut db, &name).await? {
            continue;
        }
        match (delete_rows(&mut db, services, &name).await?, is_emptied) {
            (0, false) => store::set_emptied(&mut db, &name).await?,
            (0, true) => store::remove(&mut db, &name).await?,
            _ => round = Round::Busy,
        }
    }
    Ok(round)
}

async fn delete_rows(db: &mut PgConnection, services: &[DeleteTenantRows], name: &Tenant) -> Result<u64, sqlx::Error> {
    let mut deleted = store::delete_rows(db, name, DELETED_ROWS_MAX).await?;
    for delete_of_service in services {
        deleted += delete_of_service(db, name, DELETED_ROWS_MAX).await?;
    }
    Ok(deleted)
}
