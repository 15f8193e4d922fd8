//! Checks a pooler in front of PostgreSQL (PgBouncer in transaction mode) that serves HTTP requests.
//!
//! A pooler may use a different session for each transaction. So session settings must be settings of our role, and the
//! pooler must support prepared statements across sessions. Both are checked at the start: without the former, an
//! operator that a producer created could run with our privileges, and without the latter some requests would fail.

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use super::cluster_identity;
use super::pool::{PoolLimits, SEARCH_PATH, session_settings};

/// The longest time for a check, which is a few short queries. A pooler with a single session would block forever.
const CHECK_TIME_MAX: Duration = Duration::from_secs(10);

/// A pooler that Pillarbox cannot use.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say what they mean")]
pub enum PoolerError {
    #[error(
        "database_url is a pooler (database_direct_url is set), and its sessions do not have the settings that Pillarbox needs: \
         {found}. Execute the following through database_direct_url, make the pooler open new sessions (PgBouncer: RECONNECT), \
         and start again:\n{fix}"
    )]
    Session { found: String, fix: String },
    #[error(
        "database_url is a pooler (database_direct_url is set) that does not support prepared statements: use PgBouncer \
         1.21 or newer, with max_prepared_statements above 0"
    )]
    PreparedStatements,
    #[error(
        "database_url is a pooler (database_direct_url is set) that did not provide two sessions at once within {} s: it \
         may be busy or have too few sessions (PgBouncer: default_pool_size)",
        CHECK_TIME_MAX.as_secs()
    )]
    Timeout,
    #[error(
        "database_url and database_direct_url are different databases: configure the pooler to use the database of database_direct_url"
    )]
    DifferentDatabase,
    #[error("the pooler at database_url: {0}")]
    Database(sqlx::Error),
}

impl From<sqlx::Error> for PoolerError {
    fn from(error: sqlx::Error) -> PoolerError {
        if is_missing_statement(&error) { PoolerError::PreparedStatements } else { PoolerError::Database(error) }
    }
}

/// Whether a statement was prepared in another session, or by another client in this session.
fn is_missing_statement(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|cause| cause.code());
    matches!(code.as_deref(), Some("26000" | "42P05"))
}

/// Fails unless the sessions behind the pooler have the settings of [`super::pool()`] and support prepared statements.
pub async fn check(pooler: &PgConnectOptions, limits: &PoolLimits) -> Result<(), PoolerError> {
    let checking = async {
        let settings = session_settings(limits);
        let names: Vec<&str> = settings.iter().map(|(name, _)| *name).collect();
        let expected = as_shown(pooler, &settings, &names).await?;
        for session in sample_sessions(pooler, &names).await? {
            if session.settings != expected {
                return Err(session_error(pooler, &settings, &session.settings, &expected).await?);
            }
        }
        Ok(())
    };
    tokio::time::timeout(CHECK_TIME_MAX, checking).await.unwrap_or(Err(PoolerError::Timeout))
}

/// Fails unless both pools connect to the same database. The database must be migrated.
pub async fn check_same_database(one: &PgPool, other: &PgPool) -> Result<(), PoolerError> {
    let is_same = cluster_identity::current(one).await? == cluster_identity::current(other).await?;
    if is_same { Ok(()) } else { Err(PoolerError::DifferentDatabase) }
}

/// Fails unless the pooler provides a session with the right search path. It may have opened new sessions since the
/// start.
pub async fn ping(pool: &PgPool) -> Result<(), PingError> {
    let query = "select current_setting('search_path')";
    let found: String = sqlx::query_scalar(query).fetch_one(pool).await?;
    if found == SEARCH_PATH { Ok(()) } else { Err(PingError::SearchPath(found)) }
}

/// The pooler does not provide the sessions that the program needs.
#[derive(Debug, thiserror::Error)]
pub enum PingError {
    /// A session has another search path.
    #[error(
        "a session of the pooler has the search_path {0} instead of {SEARCH_PATH}: the role has lost its settings, or got them \
         after this session began (PgBouncer: RECONNECT)"
    )]
    SearchPath(String),
    /// The database did not answer.
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

/// Returns whether the server is a pooler that uses a different session for each transaction, and not PostgreSQL
/// itself.
pub async fn is_pooler(options: &PgConnectOptions) -> sqlx::Result<bool> {
    match tokio::time::timeout(CHECK_TIME_MAX, sample_sessions(options, &[])).await {
        Ok(Ok([first, between, again])) => Ok(first.process != again.process || first.process == between.process),
        Ok(Err(error)) if is_missing_statement(&error) => Ok(true),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(false), // A slow server is not proof of a pooler.
    }
}

/// A session that served a query: its process id and the values of its settings.
struct Session {
    process: i32,
    settings: Vec<String>,
}

/// Queries three sessions: the third query is sent by the first client while a second client (most likely) occupies the
/// session of the first query.
async fn sample_sessions(options: &PgConnectOptions, names: &[&str]) -> sqlx::Result<[Session; 3]> {
    let (mut client, mut other) =
        tokio::try_join!(PgConnection::connect_with(options), PgConnection::connect_with(options))?;
    let first = read_session(&mut client, names).await?;
    let mut tx = other.begin().await?;
    let between = read_session(&mut tx, names).await?;
    let again = read_session(&mut client, names).await?;
    tx.rollback().await?;
    tokio::try_join!(client.close(), other.close())?;
    Ok([first, between, again])
}

async fn read_session(db: &mut PgConnection, names: &[&str]) -> sqlx::Result<Session> {
    let query = "select pg_backend_pid(), array(select current_setting(name) from unnest($1::text[])
                                                with ordinality as setting (name, n) order by n)";
    let (process, settings) = sqlx::query_as(query).bind(names).fetch_one(db).await?;
    Ok(Session { process, settings })
}

/// Returns the values as PostgreSQL displays them, `10s` for 10000 for example.
async fn as_shown(
    options: &PgConnectOptions,
    settings: &[(&str, String)],
    names: &[&str],
) -> sqlx::Result<Vec<String>> {
    let mut db = PgConnection::connect_with(options).await?;
    let mut tx = db.begin().await?;
    let set: String = settings.iter().map(|(name, value)| format!("set local {name} = {value};")).collect();
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *tx).await?;
    let session = read_session(&mut tx, names).await?;
    tx.rollback().await?;
    db.close().await?;
    Ok(session.settings)
}

/// Builds the error that lists the differing settings and the statements that correct them.
async fn session_error(
    options: &PgConnectOptions,
    settings: &[(&str, String)],
    found: &[String],
    expected: &[String],
) -> sqlx::Result<PoolerError> {
    let mut db = PgConnection::connect_with(options).await?;
    // The session user, because only its settings apply: `set role` does not apply those of the other role.
    let query = "select quote_ident(session_user), quote_ident(current_database())";
    let (role, database): (String, String) = sqlx::query_as(query).fetch_one(&mut db).await?;
    db.close().await?;
    let (mut differences, mut fix) = (Vec::new(), Vec::new());
    for (((name, value), found), expected) in settings.iter().zip(found).zip(expected) {
        if found != expected {
            differences.push(format!("{name} is {found} instead of {expected}"));
            fix.push(format!("alter role {role} in database {database} set {name} = {value};"));
        }
    }
    Ok(PoolerError::Session { found: differences.join("; "), fix: fix.join("\n") })
}
