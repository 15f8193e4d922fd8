//! A process that works: its heartbeat keeps everything that it has leased.

use std::time::Duration;

use kit::worker::Round;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

/// How long a process that no longer beats keeps its leases.
pub const LEASE_TIME: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub struct Replica {
    id: Uuid,
    /// For people: which machine and process.
    name: String,
    lease_time: Duration,
}

impl Replica {
    pub fn new(name: impl Into<String>, lease_time: Duration) -> Replica {
        Replica { id: Uuid::now_v7(), name: name.into(), lease_time }
    }

    pub(crate) fn id(&self) -> Uuid {
        self.id
    }

    /// How often to beat, and to share out.
    pub fn pause(&self) -> Duration {
        self.lease_time / 5
    }

    /// Says that this process is alive. In the database's time: machines' clocks differ.
    pub async fn beat(&self, db: &PgPool) -> sqlx::Result<Round> {
        self.beat_on(&mut *db.acquire().await?).await?;
        Ok(Round::Idle)
    }

    pub(crate) async fn beat_on(&self, db: &mut PgConnection) -> sqlx::Result<()> {
        sqlx::query(
            "insert into pillarbox.replica (id, name, until) values ($1, $2, now() + make_interval(secs => $3))
             on conflict (id) do update set until = excluded.until",
        )
        .bind(self.id)
        .bind(&self.name)
        .bind(self.lease_time.as_secs_f64())
        .execute(db)
        .await
        .map(drop)
    }

    /// Gives up everything at once.
    pub async fn leave(&self, db: &PgPool) -> sqlx::Result<()> {
        sqlx::query("delete from pillarbox.replica where id = $1").bind(self.id).execute(db).await.map(drop)
    }
}

/// Ends the leases of every process, for one that knows that no other lives: what a killed one held is free at once. One that
/// lives all the same is back with its next beat, and has kept nothing meanwhile.
pub async fn end_all(db: &mut PgConnection) -> sqlx::Result<()> {
    let ended = sqlx::query("delete from pillarbox.replica").execute(&mut *db).await?.rows_affected();
    sqlx::query("delete from pillarbox.lane").execute(db).await?;
    if ended > 0 {
        tracing::info!(ended, "the process before did not end in order: its work goes on here");
    }
    Ok(())
}

/// Forgets processes that ended without saying so.
pub(crate) async fn forget_gone(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(
        "delete from pillarbox.replica where until < now() - interval '1 hour';
         delete from pillarbox.lane where not exists (select from pillarbox.replica where replica.id = lane.replica)",
    )
    .execute(db)
    .await
    .map(drop)
}
