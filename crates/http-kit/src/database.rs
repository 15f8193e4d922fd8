//! The problems of database errors.

use std::time::Duration;

use http::StatusCode;
use pillarbox::database::{is_connection_lost, is_transient};
use pillarbox::log::PostError;

use crate::admission::caller_share::ShareExhausted;
use crate::problem::Problem;

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

/// For callers that build their messages themselves: an invalid message is then a bug, and an internal error.
impl From<PostError> for Problem {
    fn from(error: PostError) -> Problem {
        match error {
            PostError::Database(cause) => problem(&cause),
            PostError::Topic | PostError::Key | PostError::Aggregate | PostError::TooLarge(_) | PostError::TooDeep => {
                Problem::internal(&error)
            }
        }
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
        }
        let exhausted = problem(&sqlx::Error::Io(std::io::Error::other(ShareExhausted)));
        assert_eq!((exhausted.status().as_u16(), exhausted.code()), (503, "overloaded"));
        for error in [sqlx::Error::RowNotFound, sqlx::Error::ColumnNotFound("a".to_owned())] {
            assert_eq!(problem(&error).status().as_u16(), 500, "{error}");
        }
    }
}
