//! What the hub does when an operator suspends, resumes or deletes a tenant. Every function joins the caller's transaction,
//! except [`wait_until_applied`], which follows its commit.

pub(crate) mod quota;
mod store;

use std::time::Duration;

use pillarbox::database::Database;
use pillarbox::log::Tenant;
use sqlx::PgConnection;

use crate::directory::sync::DirectorySync;
use crate::event_types;

/// A tenant was suspended or resumed: dispatchers load their subscribers again.
pub async fn tenant_changed(db: &mut PgConnection) -> sqlx::Result<()> {
    store::count_change(db).await
}

/// The largest payload of a tenant was changed: what it posts in SQL is checked against the new limit.
pub async fn payload_limit_changed(db: &mut PgConnection) -> sqlx::Result<()> {
    event_types::store::set_stamp(db).await
}

/// Deletes the subscribers, streams, replays and event types of a tenant. Messages that wait for them are not sent.
pub async fn delete_tenant(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<()> {
    store::delete(db, tenant).await
}

/// Deletes at most `limit` rows that a deleted tenant still has, of each kind, and what requests that were in progress during its
/// deletion have created. Returns how many rows there were of those that may be many; 0: nothing is left.
pub(crate) async fn delete_tenant_rest(db: &mut PgConnection, tenant: &Tenant, limit: i64) -> sqlx::Result<u64> {
    delete_tenant(db, tenant).await?;
    store::delete_rest(db, tenant, limit).await
}

/// Returns true when every live dispatcher has applied all changes of subscribers and tenants that are committed now, and
/// false if that takes longer than `time_max` or cannot be found out.
pub async fn wait_until_applied(db: &Database, lease_time: Duration, time_max: Duration) -> bool {
    DirectorySync::new(lease_time).wait_until_applied(db, time_max).await
}
