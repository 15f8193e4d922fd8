//! Classes of database errors.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_connection_is_transient() {
        let ended = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        for error in [
            sqlx::Error::Io(ended()),
            sqlx::Error::Tls(ended().into()),
            sqlx::Error::Protocol("unexpected response from SSLRequest: 0x00".to_owned()),
            sqlx::Error::BeginFailed,
            sqlx::Error::PoolTimedOut,
            sqlx::Error::PoolClosed,
        ] {
            assert!(is_connection_lost(&error) && is_transient(&error), "{error}");
        }
    }
}
