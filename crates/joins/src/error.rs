//! The errors of the service, and the problem that each is reported as.

use std::time::Duration;

use http::StatusCode;
use http_kit::problem::{FieldError, Problem};
use pillarbox::database::is_transient;
use pillarbox::log::PostError;

use crate::domain::Refused;

/// When a client may ask again for an event that is unknown here: the message about its publication may be on its way.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The reason why a request or a message failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("you have never joined this event")]
    NotRegistered,
    #[error("only the event's organizer may do this: use the token of its owner, or the token or API key of an admin")]
    NotOrganizer,
    #[error("a message cannot be serialized: {0}")]
    Unserializable(#[from] serde_json::Error),
    #[error("a message cannot be posted: {0}")]
    Post(#[from] PostError),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

impl Error {
    /// Whether the database failed, and not because of the data: the same operation may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Error::Database(error) | Error::Post(PostError::Database(error)) if is_transient(error))
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Problem {
        // No catch-all arm: a new variant must get a problem type.
        match refused {
            // Also for an event that is hidden from the caller: the answer must not tell the difference.
            Refused::EventNotFound => Problem::not_found("event-not-found", refused).retry_after(RETRY_PAUSE),
            Refused::NotPublished => Problem::conflict("event-not-published", refused),
            Refused::EventCanceled => Problem::conflict("event-canceled", refused),
            Refused::Ended(_) => Problem::conflict("event-ended", refused),
            Refused::Banned { .. } => Problem::new(StatusCode::FORBIDDEN, "banned", refused),
            Refused::NotRegistered | Refused::NothingToCancel => Problem::not_found("not-registered", refused),
            Refused::NotBanned => Problem::not_found("not-banned", refused),
            Refused::BanInThePast => Problem::validation(vec![FieldError::body("/expires_at", &refused)]),
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
            Error::Database(cause) => http_kit::database::problem(&cause),
            Error::Unserializable(_) => Problem::internal(&error),
        }
    }
}
