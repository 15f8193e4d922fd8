//! What belongs to a tenant as a whole: the version of the directory that covers its suspension, and its deletion.

pub(crate) mod backlog;

use pillarbox::log::Tenant;
use sqlx::PgConnection;

use crate::event_types;

/// Increments the version of the directory, so that dispatchers load their subscribers again.
pub(crate) async fn count_change(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query("update pillarbox_hub.directory set version = version + 1").execute(db).await.map(drop)
}

/// Deletes the subscribers of a tenant with their secrets, detached lanes and pending commands, its streams, replays and event
/// types. Messages and attempts remain until they expire.
pub(crate) async fn delete(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<()> {
    for table in ["command", "lane", "subscriber_state"] {
        let query = format!(
            "delete from pillarbox_hub.{table}
             where subscriber in (select id from pillarbox_hub.subscriber where tenant = $1)"
        );
        sqlx::query(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).execute(&mut *db).await?;
    }
    for table in ["subscriber", "tenant_backlog", "stream", "replay", "catalogue", "event_type"] {
        let query = format!("delete from pillarbox_hub.{table} where tenant = $1");
        sqlx::query(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).execute(&mut *db).await?;
    }
    event_types::store::set_stamp(db).await
}

/// Deletes at most `limit` dead letters, deferred and rejected events of a deleted tenant. Returns how many there were.
pub(crate) async fn delete_rest(db: &mut PgConnection, tenant: &Tenant, limit: i64) -> sqlx::Result<u64> {
    let mut deleted = 0;
    for table in ["dead_letter", "deferred_event", "rejected_event"] {
        let query = format!(
            "delete from pillarbox_hub.{table}
             where ctid in (select ctid from pillarbox_hub.{table} where tenant = $1 limit $2)"
        );
        let done = sqlx::query(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(limit).execute(&mut *db).await?;
        deleted += done.rows_affected();
    }
    Ok(deleted)
}
