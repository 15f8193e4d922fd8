//! The database connections of a process: which pools it has, and the checks that must pass before it uses them.

use std::time::Duration;

use pillarbox::database::{self, Migrations, PoolLimits, cluster_identity, pooler};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgPool};

use crate::settings::Settings;
use crate::start_error::StartError;

/// The time limit of the first connection: an address that accepts it and never responds must not block the start.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// The connection pools of a process. Requests and background work have separate pools, so that neither starves the other.
#[derive(Clone)]
pub(crate) struct Pools {
    /// For requests; through the pooler, if there is one.
    pub(crate) requests: PgPool,
    /// For reads that may be slightly stale.
    pub(crate) replica: Option<PgPool>,
    /// For background work; always PostgreSQL itself, because shard workers use session state.
    pub(crate) workers: PgPool,
    /// For health checks, one connection each: a busy pool does not mean that the database is down.
    pub(crate) checks: PgPool,
    pub(crate) pooler_checks: Option<PgPool>,
}

impl Pools {
    /// Opens the pools. Fails when the pooler is unreachable or unsuitable, or when the replica is behind a pooler.
    pub(crate) async fn open(settings: &Settings, database: &PgConnectOptions) -> Result<Pools, StartError> {
        let pooler = settings.pooler()?;
        if let Some(pooler) = &pooler {
            connect("database_url", pooler).await?;
            pooler::check(pooler, &settings.pool_limits()).await?;
        }
        let for_requests = |limits| match &pooler {
            Some(pooler) => database::pool_behind_pooler(pooler.clone(), limits),
            None => database::pool(database.clone(), limits),
        };
        let lazy = PoolLimits { connections_min: 0, ..settings.pool_limits() };
        let requests = for_requests(settings.pool_limits());
        let replica = match settings.replica()? {
            // A replica that is down now does not stop the start: it may come up later.
            Some(replica) if matches!(pooler::is_pooler(&replica).await, Ok(true)) => {
                return Err(StartError::Pooled("replica_url"));
            }
            Some(replica) => Some(database::pool(replica, lazy)),
            None => None,
        };
        let for_workers = PoolLimits { connections_max: settings.worker_pool_max, for_workers: true, ..lazy };
        let single = PoolLimits { connections_max: 1, ..lazy };
        Ok(Pools {
            requests,
            replica,
            workers: database::pool(database.clone(), for_workers),
            checks: database::pool(database.clone(), single),
            pooler_checks: pooler.as_ref().map(|_| for_requests(single)),
        })
    }

    /// Fails when the schema is older than this binary, or when the pooler leads to another database. Records the cluster
    /// identity, by which shard workers notice a restored database.
    pub(crate) async fn check_database(&self, migrations: &Migrations) -> Result<(), StartError> {
        let missing = database::missing_migrations(&self.workers, migrations).await?;
        if !missing.is_empty() {
            return Err(StartError::NotMigrated(missing));
        }
        if self.pooler_checks.is_some() {
            pooler::check_same_database(&self.requests, &self.workers).await?;
        }
        Ok(cluster_identity::check(&self.workers).await?)
    }

    /// Opens the minimum number of request connections, because a lazy pool opens none before it is used.
    pub(crate) async fn warm_up(self, connections: u32) {
        // Acquire all of them before releasing any: acquired one at a time, the pool would return the same connection.
        let acquired = futures_util::future::join_all((0..connections).map(|_| self.requests.acquire())).await;
        drop(acquired);
    }

    /// Closes all pools but those of the health checks.
    pub(crate) async fn close(&self) {
        let replica = async {
            if let Some(replica) = &self.replica {
                replica.close().await;
            }
        };
        tokio::join!(self.requests.close(), replica, self.workers.close());
    }
}

/// Connects once. Fails when the database is unreachable, or is a pooler where PostgreSQL itself is needed.
pub(crate) async fn check_reachable(settings: &Settings, database: &PgConnectOptions) -> Result<(), StartError> {
    let setting = settings.database_setting();
    connect(setting, database).await?;
    // The embedded PostgreSQL is never behind a pooler.
    if settings.database_url.is_some() && pooler::is_pooler(database).await? {
        return Err(StartError::Pooled(setting));
    }
    Ok(())
}

/// Fails with the cause; a pool would only report a timeout.
async fn connect(setting: &'static str, database: &PgConnectOptions) -> Result<(), StartError> {
    match database::connect(database, CONNECT_TIME_MAX).await {
        Ok(connection) => Ok(connection.close().await?),
        Err(cause) => {
            let address = match database.get_socket() {
                Some(folder) => folder.display().to_string(),
                None => format!("{}:{}", database.get_host(), database.get_port()),
            };
            Err(StartError::Unreachable { setting, address, cause })
        }
    }
}
