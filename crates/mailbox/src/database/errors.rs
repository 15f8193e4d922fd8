//! Classes of database errors, and the problem of the HTTP API for each.

use std::time::Duration;

use http::StatusCode;
use kit::caller_share::ShareExhausted;
use kit::problem::Problem;

/// Returns whether the written values caused the error: invalid data, a violated constraint, or a program limit such as
/// JSON that is nested too deeply. Any other error may be gone when the caller tries again.
pub fn is_data_error(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|cause| cause.code()).unwrap_or_default();
    ["22", "23", "54"].iter().any(|class| code.starts_with(class))
}

/// PostgreSQL's error classes that are caused neither by the statement nor by the data: connections, transaction states,
/// rollbacks, resources, locks, operator intervention.
const TRANSIENT_CLASSES: [&str; 6] = ["08", "25", "40", "53", "55", "57"];

/// Returns whether the same statement may succeed later: the connection was lost, or the error is of a transient class.
pub fn is_transient(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_none_or(|code| TRANSIENT_CLASSES.iter().any(|class| code.starts_with(class)))
}

/// Returns whether the connection was lost, or could not be opened: the statement is not the cause, and the server may have
/// crashed or failed over. sqlx reports a connection that is closed while it is being opened as a protocol error, because
/// the response is missing.
pub fn is_connection_lost(error: &sqlx::Error) -> bool {
    use sqlx::Error;
    match error {
        Error::Database(cause) => {
            cause.code().is_some_and(|code| code.starts_with("08") || matches!(&*code, "57P01" | "57P02" | "57P03"))
        }
        Error::PoolTimedOut
        | Error::PoolClosed
        | Error::Io(_)
        | Error::Tls(_)
        | Error::Protocol(_)
        | Error::BeginFailed
        | Error::WorkerCrashed => true,
        _ => false,
    }
}

/// Returns the problem that the HTTP API shows for a database error.
pub fn problem(error: &sqlx::Error) -> Problem {
    let code = error.as_database_error().and_then(|cause| cause.code());
    match (error, code.as_deref()) {
        (sqlx::Error::Io(cause), _) if cause.get_ref().is_some_and(|cause| cause.is::<ShareExhausted>()) => {
            Problem::overloaded(cause, Duration::from_secs(1))
        }
        (error, _) if is_connection_lost(error) => Problem::unavailable(error),
        (_, Some("53100")) => {
            tracing::error!(%error, "the disk of the database is full");
            let detail = "the disk of the database is full; an operator must free some space";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "database-full", detail)
        }
        (_, Some("57014")) => {
            tracing::warn!(%error, "a statement exceeded statement_timeout_ms");
            let detail = "the request exceeded statement_timeout_ms; request less at once";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too-slow", detail)
        }
        // Serialisation failure or deadlock: the transaction was rolled back, and a second attempt most likely
        // succeeds.
        (_, Some(code)) if code.starts_with("40") => {
            tracing::warn!(%error, "a transaction was rolled back because of a concurrent one");
            let detail = "the request conflicted with a concurrent change and was rolled back; send it again";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "try-again", detail).retry_after(Duration::from_secs(1))
        }
        // The server is shutting down or starting up, is read-only after a failover, has no resources left, or lost the
        // connection.
        (_, Some(_)) if is_transient(error) => Problem::unavailable(error),
        _ => Problem::internal(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_connection_is_unavailable_and_an_unexpected_result_is_internal() {
        let ended = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        for error in [
            sqlx::Error::Io(ended()),
            sqlx::Error::Tls(ended().into()),
            sqlx::Error::Protocol("unexpected response from SSLRequest: 0x00".to_owned()),
            sqlx::Error::BeginFailed,
            sqlx::Error::PoolTimedOut,
            sqlx::Error::PoolClosed,
        ] {
            let problem = problem(&error);
            assert_eq!((problem.status().as_u16(), problem.code()), (503, "unavailable"), "{error}");
            assert!(is_transient(&error), "{error}");
        }
        let exhausted = problem(&sqlx::Error::Io(std::io::Error::other(ShareExhausted)));
        assert_eq!((exhausted.status().as_u16(), exhausted.code()), (503, "overloaded"));
        for error in [sqlx::Error::RowNotFound, sqlx::Error::ColumnNotFound("a".to_owned())] {
            assert_eq!(problem(&error).status().as_u16(), 500, "{error}");
        }
    }
}
