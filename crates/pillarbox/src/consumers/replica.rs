//! Replicas: running processes, whose heartbeat extends all of their leases.

use std::sync::Arc;
use std::time::Duration;

use runtime::boot_time::BootTime;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::lease_clock::{Lease, LeaseClock};

/// A running process.
#[derive(Debug)]
pub struct Replica {
    id: Uuid,
    /// Machine and process, shown to operators.
    name: String,
    /// How long the leases of the process outlive its last heartbeat.
    lease_time: Duration,
    clock: Arc<LeaseClock>,
}

impl Replica {
    /// Returns the process with this name. Its leases outlive its last heartbeat by `lease_time`.
    pub fn new(name: impl Into<String>, lease_time: Duration) -> Replica {
        Replica { id: Uuid::now_v7(), name: name.into(), lease_time, clock: LeaseClock::new(lease_time) }
    }

    /// Returns the lease of a worker. Call it before the database confirms that the worker owns its shards.
    pub(super) fn lease(&self) -> Lease {
        self.clock.lease()
    }

    pub(super) fn id(&self) -> Uuid {
        self.id
    }

    /// Returns how long the leases of the process outlive its last heartbeat.
    pub(super) fn lease_time(&self) -> Duration {
        self.lease_time
    }

    /// Returns the time between two heartbeats, which is also the time between two rebalances.
    pub(super) fn heartbeat_interval(&self) -> Duration {
        self.lease_time / 5
    }

    /// Extends the leases of this process. It uses the database's time, because the clocks of machines differ.
    pub(super) async fn heartbeat(&self, db: &PgPool) -> sqlx::Result<()> {
        self.heartbeat_on(&mut *db.acquire().await?).await
    }

    pub(super) async fn heartbeat_on(&self, db: &mut PgConnection) -> sqlx::Result<()> {
        let sent_at = BootTime::now();
        sqlx::query(
            "insert into pillarbox.replica (id, name, until) values ($1, $2, now() + make_interval(secs => $3))
             on conflict (id) do update set until = excluded.until",
        )
        .bind(self.id)
        .bind(&self.name)
        .bind(self.lease_time.as_secs_f64())
        .execute(db)
        .await?;
        self.clock.confirm(sent_at);
        Ok(())
    }

    /// Ends all leases of this process at once.
    pub(super) async fn remove(&self, db: &PgPool) -> sqlx::Result<()> {
        sqlx::query("delete from pillarbox.replica where id = $1").bind(self.id).execute(db).await.map(drop)
    }
}

/// Ends the leases of all processes, so that the shards of a killed process are free at once. For a process that knows
/// that no other one runs. If one runs nevertheless, it cannot commit anything until its next heartbeat, when it joins
/// again.
pub async fn end_all_leases(db: &mut PgConnection) -> sqlx::Result<()> {
    let ended = sqlx::query("delete from pillarbox.replica").execute(&mut *db).await?.rows_affected();
    sqlx::query("delete from pillarbox.shard_worker").execute(db).await?;
    if ended > 0 {
        tracing::info!(ended, "the previous process did not shut down cleanly; its shards are taken over");
    }
    Ok(())
}

/// Deletes processes that ended without releasing their leases.
pub(crate) async fn delete_expired(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(
        "delete from pillarbox.replica where until < now() - interval '1 hour';
         delete from pillarbox.shard_worker
         where not exists (select from pillarbox.replica where replica.id = shard_worker.replica)",
    )
    .execute(db)
    .await
    .map(drop)
}
