use http::StatusCode;
use kit::problem::{FieldError, Problem};
use mailbox::post::PostError;

use crate::domain::Refused;

/// What can come of a request or a message, besides an answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("you have not joined this event")]
    NotRegistered,
    #[error("this is for the event's organizer")]
    NotOrganizer,
    #[error("a message cannot be written: {0}")]
    Unwritable(#[from] serde_json::Error),
    #[error("post: {0}")]
    Post(#[from] PostError),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Problem {
        match refused {
            Refused::NoEvent => Problem::not_found("event-not-found", refused),
            Refused::NotPublished => Problem::conflict("event-not-published", refused),
            Refused::EventCanceled => Problem::conflict("event-canceled", refused),
            Refused::Ended(_) => Problem::conflict("event-ended", refused),
            Refused::Banned(_) => Problem::new(StatusCode::FORBIDDEN, "banned", refused),
            Refused::NotIn | Refused::NothingToCancel => Problem::not_found("not-registered", refused),
            Refused::NotBanned => Problem::not_found("not-banned", refused),
            Refused::BanInThePast => Problem::validation(vec![FieldError::body(
                "/expires_at",
                "takes a time in the future, or nothing for ever",
            )]),
        }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        match error {
            Error::Refused(refused) => refused.into(),
            Error::NotRegistered => Problem::not_found("not-registered", &error),
            Error::NotOrganizer => Problem::forbidden(&error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => mailbox::database::problem(&cause),
            Error::Unwritable(_) => Problem::internal(&error),
        }
    }
}
