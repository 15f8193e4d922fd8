//! Database steps: everything that waits for PostgreSQL has a time limit.
//!
//! A connection whose other end vanished without closing it looks like one whose statement takes long. PostgreSQL ends a
//! statement after `statement_timeout`, so a step without a response for longer than that waits for a dead connection.
//! sqlx sets neither TCP keepalive nor `TCP_USER_TIMEOUT` and offers no way to do so; the limits here replace them.

use std::future::Future;
use std::io;
use std::time::Duration;

use futures_util::FutureExt;
use runtime::deadline::{self, Expired};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection, PgPool, Row};

/// The time limit of a step that normally takes milliseconds: a poll, a heartbeat, a short write.
pub const SHORT_STEP_TIME_MAX: Duration = Duration::from_secs(5);
/// The time limit of other steps, unless `statement_timeout` is known.
pub(super) const STEP_TIME_MAX: Duration = Duration::from_secs(12);
/// How much longer than its statements a step may take.
pub(super) const STEP_TIME_ALLOWANCE: Duration = Duration::from_secs(2);
/// The time limit for testing whether a connection is alive.
const PING_TIME_MAX: Duration = Duration::from_secs(1);

/// Runs a step on connections of this pool. If it does not end in time, it is dropped, its connections and the idle ones of
/// the pool are closed, and it fails like a lost connection; the error contains the name of the step.
pub fn step<T, E: From<sqlx::Error>>(
    db: &PgPool,
    name: &str,
    time_max: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> impl Future<Output = Result<T, E>> {
    // Not an `async fn`: see `deadline::within`.
    deadline::within(time_max, work).map(move |ended| match ended {
        Ok(result) => result,
        Err(expired) => {
            close_idle(db);
            Err(no_response(name, expired).into())
        }
    })
}

/// Closes the idle connections of a pool, without waiting for the other side: if one connection is dead, the others probably
/// are as well. A worker must not wait for each of them in turn.
pub fn close_idle(db: &PgPool) {
    for _ in 0..db.size() {
        match db.try_acquire() {
            Some(connection) => drop(connection.detach()),
            None => return,
        }
    }
}

/// Connects to a database. Fails if it does not respond in time.
pub async fn connect(options: &PgConnectOptions, time_max: Duration) -> sqlx::Result<PgConnection> {
    let connecting = deadline::within(time_max, PgConnection::connect_with(options));
    connecting.await.unwrap_or_else(|expired| Err(no_response("connect", expired)))
}

/// Whether the error is that of a step without a response.
pub fn is_no_response(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut)
}

/// Fails unless the connection responds soon.
pub(super) async fn ping_connection(connection: &mut PgConnection) -> sqlx::Result<()> {
    let pinging = deadline::within(PING_TIME_MAX, connection.ping());
    pinging.await.unwrap_or_else(|expired| Err(no_response("ping", expired)))
}

/// Returns whether the connection is in a transaction that an earlier statement has begun. Fails unless it responds soon.
pub(super) async fn has_open_transaction(connection: &mut PgConnection) -> sqlx::Result<bool> {
    // A statement that is its own transaction begins with it. Only in the simple protocol, in which it is one message.
    let asking = sqlx::raw_sql("select now() <> statement_timestamp()").fetch_one(connection);
    let asked = deadline::within(PING_TIME_MAX, asking).await;
    asked.unwrap_or_else(|expired| Err(no_response("ping", expired)))?.try_get(0)
}

/// The error of a step without a response.
pub(crate) fn no_response(name: &str, expired: Expired) -> sqlx::Error {
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, format!("{name}: the database: {expired}")))
}
