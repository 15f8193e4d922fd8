//! Connection pools and the settings of their sessions.
//!
//! sqlx tests each connection that returns to its pool, without a time limit: a dead one would occupy its place for ever. So
//! the pool itself first tests, with a time limit, connections that may be dead because a step was abandoned. Such a connection
//! may also be in a transaction, of which sqlx knows nothing if the step was abandoned while it waited for the response to
//! `begin`: the statements of others would become a part of it. It is closed.

use std::time::Duration;

use runtime::deadline;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

use super::step::{SHORT_STEP_TIME_MAX, has_open_transaction, no_response, ping_connection};

/// The search path of every session. An operator that a producer created in another schema must not replace a built-in
/// one: it would run with our privileges.
pub(crate) const SEARCH_PATH: &str = "pg_catalog, pg_temp";
/// Our name in `pg_stat_activity`.
const APPLICATION: &str = "pillarbox";

/// The size of a pool, and the settings of its sessions.
#[derive(Debug, Clone, Copy)]
pub struct PoolLimits {
    /// It keeps so many connections open.
    pub connections_min: u32,
    /// It opens no more connections.
    pub connections_max: u32,
    /// PostgreSQL ends a statement after this time.
    pub statement_timeout: Duration,
    /// How long a request may wait for a connection before it is rejected as overload.
    pub acquire_timeout: Duration,
    /// For background work that repeats the same statements and retries after errors. A statement is planned once for
    /// all values (planning the reader's query takes ten times as long as executing it), and a connection is not tested
    /// before each use: a worker must learn that it was lost, because the database may have restarted or failed over.
    pub for_workers: bool,
    /// Called whenever an idle connection is used again. A debug build can check there that the task was admitted.
    pub before_acquire: fn(),
}

impl Default for PoolLimits {
    fn default() -> PoolLimits {
        PoolLimits {
            connections_min: 10,
            connections_max: 20,
            statement_timeout: Duration::from_secs(10),
            acquire_timeout: Duration::from_secs(5),
            for_workers: false,
            before_acquire: || {},
        }
    }
}

/// Creates a pool. It connects when it is first used, so the database need not be available yet.
pub fn pool(options: PgConnectOptions, limits: PoolLimits) -> PgPool {
    let settings = session_settings(&limits).into_iter().chain(vanished_client_settings());
    let settings: String = settings.map(|(name, value)| format!("set {name} = {value};")).collect();
    pool_options(&limits)
        .after_connect(move |connection, _| {
            let settings = settings.clone();
            Box::pin(async move {
                let setting = async { sqlx::raw_sql(AssertSqlSafe(settings)).execute(connection).await.map(drop) };
                let set = deadline::within(SHORT_STEP_TIME_MAX, setting).await;
                set.unwrap_or_else(|expired| Err(no_response("session settings", expired)))
            })
        })
        .connect_lazy_with(options.application_name(APPLICATION))
}

/// Creates a pool that connects through a pooler. A pooler may use a different session for each transaction: settings
/// that we make in one would be lost to us and would affect other clients. So [`super::pooler::check`] verifies the
/// settings once instead.
pub fn pool_behind_pooler(options: PgConnectOptions, limits: PoolLimits) -> PgPool {
    pool_options(&limits).connect_lazy_with(options.application_name(APPLICATION))
}

/// Fails unless the database executes a query.
pub async fn ping(pool: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::query("select 1").execute(pool).await.map(drop)
}

fn pool_options(limits: &PoolLimits) -> PgPoolOptions {
    let (for_workers, before_acquire) = (limits.for_workers, limits.before_acquire);
    PgPoolOptions::new()
        .min_connections(limits.connections_min)
        .max_connections(limits.connections_max)
        .acquire_timeout(limits.acquire_timeout)
        // Has no time limit; `before_acquire` does the same with one.
        .test_before_acquire(false)
        .before_acquire(move |connection, _| {
            before_acquire();
            Box::pin(async move {
                if !for_workers {
                    ping_connection(connection).await?;
                }
                Ok(true)
            })
        })
        .after_release(move |connection, _| {
            Box::pin(async move {
                // Only requests are dropped by their callers, when a client closes its connection.
                let may_be_dead =
                    if for_workers { deadline::expired_recently() } else { deadline::abandoned_recently() };
                Ok(!may_be_dead || !has_open_transaction(connection).await?)
            })
        })
}

/// With these settings PostgreSQL notices within seconds that our process or the network is gone, and ends the
/// transactions whose locks others wait for. A pooler has separate settings for its clients.
fn vanished_client_settings() -> [(&'static str, String); 6] {
    [
        ("idle_in_transaction_session_timeout", "10000".to_owned()),
        // A step that we gave up has closed its connection: its statement must not hold locks until it ends by itself.
        ("client_connection_check_interval", "1000".to_owned()),
        ("tcp_keepalives_idle", "5".to_owned()),
        ("tcp_keepalives_interval", "2".to_owned()),
        ("tcp_keepalives_count", "3".to_owned()),
        ("tcp_user_timeout", "10000".to_owned()),
    ]
}

/// The names and SQL values of the settings of every session.
pub(crate) fn session_settings(limits: &PoolLimits) -> Vec<(&'static str, String)> {
    let mut settings = vec![
        ("search_path", SEARCH_PATH.to_owned()),
        // Compiling a query at each execution takes 200 ms instead of 3.
        ("jit", "off".to_owned()),
        ("statement_timeout", limits.statement_timeout.as_millis().to_string()),
        ("idle_in_transaction_session_timeout", "20000".to_owned()),
    ];
    if limits.for_workers {
        settings.push(("plan_cache_mode", "force_generic_plan".to_owned()));
        // The generic plan is made while a day's partition is still empty. It must not scan the partition once it is
        // full.
        settings.push(("enable_seqscan", "off".to_owned()));
    }
    settings
}
