use http::StatusCode;
use kit::problem::{FieldError, Problem};
use mailbox::post::PostError;

use crate::domain::Refused;

/// What a people's request can end with, besides an answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no such event")]
    NoEvent,
    #[error("this event is another user's: only who made it may change it")]
    NotTheOwner,
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("fields are not what they should be")]
    Invalid(Vec<FieldError>),
    #[error("it was changed meanwhile")]
    Stale(Problem),
    #[error("the order that this cursor walks along is not kept any more: start again without it")]
    CursorExpired,
    #[error("q cannot be read as a search: take out some of its signs")]
    Unsearchable,
    #[error("post: {0}")]
    Post(#[from] PostError),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        match error {
            Error::NoEvent => Problem::not_found("event-not-found", &error),
            Error::NotTheOwner => Problem::forbidden(&error),
            Error::Refused(_) => Problem::conflict("transition-refused", &error),
            Error::Invalid(errors) => Problem::validation(errors),
            Error::Stale(problem) => problem,
            Error::Unsearchable => {
                kit::extract::query_problem("/q", "cannot be read as a search: take out some of its signs")
            }
            Error::CursorExpired => Problem::new(StatusCode::GONE, "cursor-expired", &error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => mailbox::database::problem(&cause),
        }
    }
}
