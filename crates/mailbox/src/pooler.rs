//! A pooler in front of PostgreSQL (PgBouncer in transaction mode), for requests: what it has to do for us.
//!
//! It hands out another session for each transaction. So settings cannot be made by us, and belong to our role; and a prepared
//! statement must be found again in whichever session, which the pooler sees to. Both are tried at the start: without the
//! first, a producer's operator could run with our rights, and without the second one request in a few would fail.

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use crate::database::{PoolLimits, SEARCH_PATH, session};
use crate::home;

/// For a handful of short questions; a pooler with one session alone has us wait for ourselves.
const TRY_TIME_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum BadPooler {
    #[error(
        "database_url is a pooler (database_direct_url is set), and its sessions are not as Pillarbox needs them: {found}. Run \
         this by database_direct_url, let the pooler open new sessions (PgBouncer: RECONNECT), and start again:\n{cure}"
    )]
    Session { found: String, cure: String },
    #[error(
        "database_url is a pooler (database_direct_url is set) that loses prepared statements: this takes PgBouncer 1.21 or \
         newer, with max_prepared_statements above 0"
    )]
    Statements,
    #[error(
        "database_url is a pooler (database_direct_url is set) that did not give out two sessions at once within {} s: it may be \
         busy, or have too few of them (PgBouncer: default_pool_size)",
        TRY_TIME_MAX.as_secs()
    )]
    Slow,
    #[error(
        "database_url and database_direct_url lead to different databases: let the pooler lead to the one behind it"
    )]
    Elsewhere,
    #[error("the pooler at database_url: {0}")]
    Database(sqlx::Error),
}

impl From<sqlx::Error> for BadPooler {
    fn from(error: sqlx::Error) -> BadPooler {
        if is_lost_statement(&error) { BadPooler::Statements } else { BadPooler::Database(error) }
    }
}

/// Prepared in another session, or by another client in this one.
fn is_lost_statement(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|cause| cause.code());
    matches!(code.as_deref(), Some("26000" | "42P05"))
}

/// Fails unless sessions behind the pooler are as [`crate::database::pool`] would make them, and keep what is prepared.
pub async fn check(pooler: &PgConnectOptions, limits: &PoolLimits) -> Result<(), BadPooler> {
    let checking = async {
        let session = session(limits);
        let names: Vec<&str> = session.iter().map(|(name, _)| *name).collect();
        let wanted = as_shown(pooler, &session, &names).await?;
        for seen in look_twice(pooler, &names).await? {
            if seen.settings != wanted {
                return Err(differing(pooler, &session, &seen.settings, &wanted).await?);
            }
        }
        Ok(())
    };
    tokio::time::timeout(TRY_TIME_MAX, checking).await.unwrap_or(Err(BadPooler::Slow))
}

/// Fails unless both lead to the same database, which has our schema.
pub async fn check_same(one: &PgPool, other: &PgPool) -> Result<(), BadPooler> {
    match home::whereabouts(one).await? == home::whereabouts(other).await? {
        true => Ok(()),
        false => Err(BadPooler::Elsewhere),
    }
}

/// Fails unless the pooler answers, with a session that is safe: it may have opened others since the start.
pub async fn ping(pool: &PgPool) -> Result<(), String> {
    let ask = "select current_setting('search_path')";
    match sqlx::query_scalar::<_, String>(ask).fetch_one(pool).await {
        Ok(found) if found == SEARCH_PATH => Ok(()),
        Ok(found) => Err(format!(
            "a session of the pooler has the search_path {found} instead of {SEARCH_PATH}: our role has lost its settings, \
             or had them after this session began (PgBouncer: RECONNECT)"
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether what is taken for PostgreSQL itself is a pooler that hands out another session for each transaction.
pub async fn is_pooler(options: &PgConnectOptions) -> sqlx::Result<bool> {
    match tokio::time::timeout(TRY_TIME_MAX, look_twice(options, &[])).await {
        Ok(Ok([first, between, again])) => Ok(first.process != again.process || first.process == between.process),
        Ok(Err(error)) if is_lost_statement(&error) => Ok(true),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(false), // or only slow
    }
}

/// A session that a client was given.
struct Seen {
    process: i32,
    settings: Vec<String>,
}

/// Asks, and once more while another client has (most likely) taken the session that had the first question.
async fn look_twice(options: &PgConnectOptions, names: &[&str]) -> sqlx::Result<[Seen; 3]> {
    let (mut asking, mut between) =
        tokio::try_join!(PgConnection::connect_with(options), PgConnection::connect_with(options))?;
    let first = look(&mut asking, names).await?;
    let mut tx = between.begin().await?;
    let taken = look(&mut tx, names).await?;
    let again = look(&mut asking, names).await?;
    tx.rollback().await?;
    tokio::try_join!(asking.close(), between.close())?;
    Ok([first, taken, again])
}

async fn look(db: &mut PgConnection, names: &[&str]) -> sqlx::Result<Seen> {
    let ask = "select pg_backend_pid(), array(select current_setting(name) from unnest($1::text[])
                                              with ordinality as asked (name, place) order by place)";
    let (process, settings) = sqlx::query_as(ask).bind(names).fetch_one(db).await?;
    Ok(Seen { process, settings })
}

/// What PostgreSQL shows once these are set: `10s` for 10000.
async fn as_shown(options: &PgConnectOptions, session: &[(&str, String)], names: &[&str]) -> sqlx::Result<Vec<String>> {
    let mut db = PgConnection::connect_with(options).await?;
    let mut tx = db.begin().await?;
    let set: String = session.iter().map(|(name, value)| format!("set local {name} = {value};")).collect();
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *tx).await?;
    let seen = look(&mut tx, names).await?;
    tx.rollback().await?;
    db.close().await?;
    Ok(seen.settings)
}

async fn differing(
    options: &PgConnectOptions,
    session: &[(&str, String)],
    found: &[String],
    wanted: &[String],
) -> sqlx::Result<BadPooler> {
    let mut db = PgConnection::connect_with(options).await?;
    // Of who logs in: a role that is taken on later brings no settings.
    let ask = "select quote_ident(session_user), quote_ident(current_database())";
    let (role, database): (String, String) = sqlx::query_as(ask).fetch_one(&mut db).await?;
    db.close().await?;
    let (mut differences, mut cure) = (Vec::new(), Vec::new());
    for (((name, value), found), wanted) in session.iter().zip(found).zip(wanted) {
        if found != wanted {
            differences.push(format!("{name} is {found} instead of {wanted}"));
            cure.push(format!("alter role {role} in database {database} set {name} = {value};"));
        }
    }
    Ok(BadPooler::Session { found: differences.join("; "), cure: cure.join("\n") })
}
