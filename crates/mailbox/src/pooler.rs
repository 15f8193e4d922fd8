//! A pooler in front of PostgreSQL (PgBouncer in transaction mode), for requests: what it has to do for us.
//!
//! It hands out another session for each transaction. So settings cannot be made by us, and belong to our role; and a prepared
//! statement must be found again in whichever session, which the pooler sees to. Both are tried at the start: without the
//! first, a producer's operator could run with our rights, and without the second one request in a few would fail.

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::database::{PoolLimits, session};

/// A pooler with one session alone has us wait for ourselves.
const TRY_TIME_MAX: Duration = Duration::from_secs(5);

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
    #[error("the pooler at database_url: {0}")]
    Database(sqlx::Error),
}

impl From<sqlx::Error> for BadPooler {
    fn from(error: sqlx::Error) -> BadPooler {
        match error.as_database_error().and_then(|cause| cause.code()).as_deref() {
            // Prepared in another session, or by another client in this one.
            Some("26000" | "42P05") => BadPooler::Statements,
            _ => BadPooler::Database(error),
        }
    }
}

/// Fails unless sessions behind the pooler are as [`crate::database::pool`] would make them, and keep what is prepared.
pub async fn check(pooler: &PgConnectOptions, limits: &PoolLimits) -> Result<(), BadPooler> {
    let mut asking = PgConnection::connect_with(pooler).await?;
    let session = session(limits);
    check_settings(&mut asking, &session).await?;
    // Another client takes the session that has the statement; who has prepared it is given another one.
    let mut between = PgConnection::connect_with(pooler).await?;
    let mut tx = between.begin().await?;
    sqlx::raw_sql("select 1").execute(&mut *tx).await?;
    let again = tokio::time::timeout(TRY_TIME_MAX, shown(&mut asking, &session)).await;
    tx.rollback().await?;
    // Or there is no other session than the one that we have taken ourselves.
    if let Ok(shown) = again {
        shown?;
        asking.close().await?;
    }
    between.close().await?;
    Ok(())
}

async fn check_settings(db: &mut PgConnection, session: &[(&str, String)]) -> Result<(), BadPooler> {
    let found = shown(db, session).await?;
    // As PostgreSQL shows them: `10s` for 10000.
    let mut tx = db.begin().await?;
    let set: String = session.iter().map(|(name, value)| format!("set local {name} = {value};")).collect();
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *tx).await?;
    let wanted = shown(&mut tx, session).await?;
    tx.rollback().await?;
    if found == wanted {
        return Ok(());
    }
    let (role, database): (String, String) =
        sqlx::query_as("select quote_ident(current_user), quote_ident(current_database())").fetch_one(db).await?;
    let (mut differences, mut cure) = (Vec::new(), Vec::new());
    for (((name, value), found), wanted) in session.iter().zip(found).zip(wanted) {
        if found != wanted {
            differences.push(format!("{name} is {found} instead of {wanted}"));
            cure.push(format!("alter role {role} in database {database} set {name} = {value};"));
        }
    }
    Err(BadPooler::Session { found: differences.join(", "), cure: cure.join("\n") })
}

async fn shown(db: &mut PgConnection, session: &[(&str, String)]) -> sqlx::Result<Vec<String>> {
    let names: Vec<&str> = session.iter().map(|(name, _)| *name).collect();
    let ask =
        "select current_setting(name) from unnest($1::text[]) with ordinality as asked (name, place) order by place";
    sqlx::query_scalar(ask).bind(names).fetch_all(db).await
}
