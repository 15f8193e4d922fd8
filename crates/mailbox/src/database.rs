//! The pool and the migrations.

use std::time::Duration;

use http::StatusCode;
use kit::problem::Problem;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

/// No operator that a producer has made in another schema may stand in for one of PostgreSQL's own: it would run with our
/// rights.
pub(crate) const SEARCH_PATH: &str = "pg_catalog, pg_temp";
/// How PostgreSQL's own views name us.
const APPLICATION: &str = "pillarbox";

#[derive(Debug, Clone, Copy)]
pub struct PoolLimits {
    pub connections_min: u32,
    pub connections_max: u32,
    pub statement_timeout: Duration,
    /// How long a request may wait for a connection before it is answered as overload.
    pub acquire_timeout: Duration,
    /// For work that does the same again and again, and tries again what fails: a plan is made once for all values (making
    /// the plan to read the log takes ten times as long as reading it), and no connection is tried before it is used.
    pub for_workers: bool,
}

impl Default for PoolLimits {
    fn default() -> PoolLimits {
        PoolLimits {
            connections_min: 10,
            connections_max: 20,
            statement_timeout: Duration::from_secs(10),
            acquire_timeout: Duration::from_secs(5),
            for_workers: false,
        }
    }
}

/// A pool that connects when it is first used: a database that is away now may be there later.
pub fn pool(options: PgConnectOptions, limits: PoolLimits) -> PgPool {
    let session: String = session(&limits).iter().map(|(name, value)| format!("set {name} = {value};")).collect();
    pool_options(&limits)
        .after_connect(move |connection, _| {
            let session = session.clone();
            Box::pin(async move { sqlx::raw_sql(AssertSqlSafe(session)).execute(connection).await.map(drop) })
        })
        .connect_lazy_with(options.application_name(APPLICATION))
}

/// The same through a pooler, which may hand out another session for each transaction: what is set in one would be lost to
/// us and come upon others, so [`crate::pooler::check`] is asked once instead.
pub fn pool_behind_pooler(options: PgConnectOptions, limits: PoolLimits) -> PgPool {
    pool_options(&limits).connect_lazy_with(options.application_name(APPLICATION))
}

fn pool_options(limits: &PoolLimits) -> PgPoolOptions {
    PgPoolOptions::new()
        .min_connections(limits.connections_min)
        .max_connections(limits.connections_max)
        .acquire_timeout(limits.acquire_timeout)
        .test_before_acquire(!limits.for_workers)
}

/// What every session of ours has, by name, as SQL writes it.
pub(crate) fn session(limits: &PoolLimits) -> Vec<(&'static str, String)> {
    let mut session = vec![
        ("search_path", SEARCH_PATH.to_owned()),
        // A query that is compiled at each execution takes 200 ms instead of 3.
        ("jit", "off".to_owned()),
        ("statement_timeout", limits.statement_timeout.as_millis().to_string()),
        ("idle_in_transaction_session_timeout", "20000".to_owned()),
    ];
    if limits.for_workers {
        session.push(("plan_cache_mode", "force_generic_plan".to_owned()));
        // A plan that is made once is made for a day's partition that is empty: it must not scan it when it is full.
        session.push(("enable_seqscan", "off".to_owned()));
    }
    session
}

/// One timeline for all schemas. Its table is in ours: a database may have other migrations beside.
pub fn migrations() -> Migrator {
    let mut migrations = sqlx::migrate!("../../migrations");
    migrations.create_schema("pillarbox");
    migrations.dangerous_set_table_name("pillarbox.migration");
    // The binary before this one runs on the schema after it, so that replicas can be replaced one by one.
    migrations.set_ignore_missing(true);
    migrations
}

/// Applies what is missing, and says which. Safe to run by several processes at once: they take turns.
pub async fn migrate(options: &PgConnectOptions) -> Result<Vec<i64>, MigrateError> {
    let mut connection = PgConnection::connect_with(options).await?;
    // Our role may have limits that are meant for requests. And the log would have a line at each start for what is there.
    let session = format!(
        "set search_path = {SEARCH_PATH}; set statement_timeout = 0; set idle_in_transaction_session_timeout = 0;
         set client_min_messages = warning"
    );
    sqlx::raw_sql(AssertSqlSafe(session)).execute(&mut connection).await?;
    let missing = missing_in(&mut connection).await?;
    migrations().run(&mut connection).await?;
    connection.close().await?;
    Ok(missing)
}

/// The versions that this binary needs and the database does not have.
pub async fn missing_migrations(pool: &PgPool) -> Result<Vec<i64>, sqlx::Error> {
    missing_in(&mut *pool.acquire().await?).await
}

async fn missing_in(db: &mut PgConnection) -> Result<Vec<i64>, sqlx::Error> {
    let migrated: bool =
        sqlx::query_scalar("select to_regclass('pillarbox.migration') is not null").fetch_one(&mut *db).await?;
    let applied: Vec<i64> = if migrated {
        sqlx::query_scalar("select version from pillarbox.migration where success").fetch_all(db).await?
    } else {
        Vec::new()
    };
    let needed = migrations();
    Ok(needed.iter().map(|migration| migration.version).filter(|version| !applied.contains(version)).collect())
}

/// Fails unless the database answers.
pub async fn ping(pool: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::query("select 1").execute(pool).await.map(drop)
}

/// Whether what is wrong is what was to be written: bad data, a broken constraint, a limit of the program (JSON that is
/// nested too deeply). Any other error may be over the next time.
pub fn lies_in_the_values(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|cause| cause.code()).unwrap_or_default();
    ["22", "23", "54"].iter().any(|class| code.starts_with(class))
}

/// The public face of a database error.
pub fn problem(error: &sqlx::Error) -> Problem {
    let code = error.as_database_error().and_then(|cause| cause.code());
    match (error, code.as_deref()) {
        (sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Io(_) | sqlx::Error::Tls(_), _) => {
            Problem::unavailable(error)
        }
        // Shutting down or starting up; out of resources; connection lost.
        (_, Some("57P01" | "57P02" | "57P03")) => Problem::unavailable(error),
        (_, Some("53100")) => {
            tracing::error!(%error, "the database's disk is full");
            let detail = "the database has no room left; an operator must make some";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "database-full", detail)
        }
        (_, Some(code)) if code.starts_with("53") || code.starts_with("08") => Problem::unavailable(error),
        (_, Some("57014")) => {
            tracing::warn!(%error, "a statement took too long");
            let detail = "this took longer than statement_timeout_ms allows; ask for less at once";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too-slow", detail)
        }
        // Serialisation failure, deadlock: nothing was done, and the same again will most likely pass.
        (_, Some(code)) if code.starts_with("40") => {
            tracing::warn!(%error, "transactions met");
            let detail = "this met another change at the same moment and was undone; send it again";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "try-again", detail).retry_after(Duration::from_secs(1))
        }
        _ => Problem::internal(error),
    }
}
