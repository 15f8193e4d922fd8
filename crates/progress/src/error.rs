//! The errors of the service, and the problem that each is reported as.

use std::time::Duration;

use http::StatusCode;
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::PostError;

use crate::domain::Refused;

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("some fields are invalid")]
    Invalid(Vec<FieldError>),
    #[error("this project does not exist")]
    NotFound,
    #[error("there is a project with this id already: choose another id, or none to get a new one")]
    Exists,
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error(
        "the counts of this project are lost: the server that had them was restarted or emptied, or has evicted them. Initialise \
         them with POST /progress/v1/projects/{0}/restart, set the total and the status, and send all items again; an item \
         still counts once"
    )]
    Lost(String),
    #[error(
        "the counts of this project have expired, because it did not finish in time. Initialise them with POST \
         /progress/v1/projects/{0}/restart, set the total and the status, and send all items again"
    )]
    Expired(String),
    #[error("the counts of this project are complete, so there is no reason to initialise them again")]
    NotLost,
    #[error(
        "you have {0} unfinished projects, which is the maximum: finish some of them, set them to FAILED, or wait until they expire"
    )]
    TooManyProjects(u32),
    #[error("the project has another version than If-Match")]
    Stale(Box<Problem>),
    #[error("the project has ended, and its end cannot be recorded at present; repeat the request")]
    NotArchived,
    #[error("the project is being changed by many requests at once; try again")]
    Contended,
    #[error("{0}")]
    State(#[from] StateError),
    #[error("a message cannot be serialized: {0}")]
    Unserializable(#[from] serde_json::Error),
    #[error("a message cannot be posted: {0}")]
    Post(#[from] PostError),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

/// The reason why the counts cannot be read or changed at present.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum StateError {
    #[error(
        "the Redis of progress cannot be reached; it is tried again in the background, and /readyz names the cause"
    )]
    Unavailable { retry_after: Duration },
    #[error("the Redis of progress refuses writes because its memory is full; an operator must give it more")]
    MemoryFull,
    #[error("the Redis of progress refuses commands ({0}); /readyz names the cause, and an operator must remove it")]
    Refused(&'static str),
    #[error(
        "the project would have more than {0} items, which is the maximum of one project: distribute them over several projects, or \
         raise the setting progress.items_max"
    )]
    TooManyItems(i64),
    #[error("a script of progress failed in Redis: {0}")]
    Script(String),
    #[error("the database failed: {0}")]
    Database(std::sync::Arc<sqlx::Error>),
}

impl From<sqlx::Error> for StateError {
    fn from(error: sqlx::Error) -> StateError {
        StateError::Database(std::sync::Arc::new(error))
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        // No catch-all arm: a new variant must get a problem type.
        match error {
            Error::Invalid(errors) => Problem::validation(errors),
            Error::NotFound => Problem::not_found("project-not-found", &error),
            Error::Exists => Problem::conflict("project-exists", &error),
            Error::Refused(Refused::Finished(_)) => Problem::conflict("project-finished", &error),
            Error::Refused(Refused::Transition { .. }) => Problem::conflict("transition-refused", &error),
            Error::Lost(_) | Error::Expired(_) => {
                metrics::counter!("pillarbox_progress_lost_total").increment(1);
                Problem::conflict("progress-lost", &error)
            }
            Error::NotLost => Problem::conflict("progress-not-lost", &error),
            Error::TooManyProjects(_) => Problem::conflict("too-many-projects", &error),
            Error::Stale(problem) => *problem,
            Error::NotArchived => {
                Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &error).retry_after(Duration::from_secs(1))
            }
            Error::Contended => Problem::overloaded(&error, Duration::from_secs(1)),
            Error::State(ref cause) => of_state(cause, &error),
            Error::Unserializable(_) => Problem::internal(&error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => http_kit::database::problem(&cause),
        }
    }
}

fn of_state(cause: &StateError, error: &Error) -> Problem {
    match cause {
        // Readiness and the log report the outage once, and not with each request.
        StateError::Unavailable { retry_after } => {
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", error).retry_after(*retry_after)
        }
        StateError::MemoryFull => Problem::overloaded(error, Duration::from_secs(5)),
        StateError::Refused(_) => {
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", error).retry_after(Duration::from_secs(5))
        }
        StateError::TooManyItems(_) => Problem::conflict("too-many-items", error),
        StateError::Script(_) => Problem::internal(error),
        StateError::Database(cause) => http_kit::database::problem(cause),
    }
}
