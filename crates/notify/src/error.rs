//! The errors of the service, and the problem that each is reported as.

use kit::problem::Problem;

use crate::address::InvalidAddress;
use crate::templates::RenderError;

/// The reason why a request of an operator failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no such e-mail (any more)")]
    NotFound,
    #[error("only a dead e-mail can be retried")]
    NotDead,
    #[error("this e-mail has expired, and its text was erased; request a new one")]
    Erased,
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        // No catch-all arm: a new variant must get a problem type.
        match error {
            Error::NotFound => Problem::not_found("mail-not-found", &error),
            Error::NotDead => Problem::conflict("mail-not-dead", &error),
            Error::Erased => Problem::conflict("mail-erased", &error),
            Error::Database(cause) => mailbox::database::problem(&cause),
        }
    }
}

/// Why a message could not be processed. The text contains nothing of the message, which may contain secrets.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error(
        "the payload is no request for an e-mail: it needs idempotency_key, and data with to, template, variables (a map of \
         texts) and locale"
    )]
    NoRequest,
    #[error("the payload has no user_id")]
    NoAccount,
    #[error("idempotency_key must have 1 to 255 characters")]
    IdempotencyKey,
    #[error(transparent)]
    Address(#[from] InvalidAddress),
    #[error("the e-mail cannot be rendered: {0}")]
    Render(#[from] RenderError),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

/// Why a round of the sender failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendingError {
    #[error("the mail server cannot be used: {0}")]
    Server(String),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}
