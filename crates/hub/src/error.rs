//! The errors of the hub's use cases, and the problems that the API returns for them.

use kit::problem::{FieldError, Problem};
use mailbox::log::PostError;

use crate::domain::Outcome;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no such subscriber")]
    NoSubscriber,
    #[error(
        "there is no such hub event, or its retention has expired (dead letters keep a copy of theirs; events posted in SQL are at `/admin/v1/log/{{id}}`)"
    )]
    NoEvent,
    #[error("there is no such message, or its retention has expired; see the dead letters")]
    NoMessage,
    #[error("there is no such dead letter")]
    NoDeadLetter,
    #[error("some fields are invalid")]
    Invalid(Vec<FieldError>),
    #[error("the subscriber was changed by another request")]
    Stale(Problem),
    #[error(
        "the subscriber has {0} active secrets: wait until one expires, or rotate with `overlap_hours: 0`, which ends all earlier ones"
    )]
    TooManySecrets(usize),
    #[error(
        "a tenant can have at most {0} subscribers (`hub.subscribers_max`): delete those that are no longer needed, or ask the operator for a higher limit"
    )]
    TooManySubscribers(u32),
    #[error("the message is already {0}")]
    AlreadyFinal(Outcome),
    #[error("the dead letter was already retried; if the message fails again, it becomes a new dead letter")]
    AlreadyRetried,
    #[error("the subscriber of this dead letter was deleted, so the message cannot be sent again")]
    SubscriberDeleted,
    #[error("the log no longer had the event when the message was given up, so there is nothing to send")]
    EventExpired,
    #[error(
        "the subscriber's headers and secrets cannot be decrypted with the keys of this installation: add the former key to `secret_keys_previous`, or delete the subscriber and create it again"
    )]
    Undecryptable,
    #[error("a stored subscriber is invalid: {0}")]
    InvalidSubscriber(String),
    #[error("post: {0}")]
    Post(#[from] PostError),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl Error {
    /// One invalid field of the request body.
    pub(crate) fn field(pointer: &str, detail: impl std::fmt::Display) -> Error {
        Error::Invalid(vec![FieldError::body(pointer, detail)])
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        match error {
            Error::NoSubscriber => Problem::not_found("subscriber-not-found", &error),
            Error::NoEvent => Problem::not_found("event-not-found", &error),
            Error::NoMessage => Problem::not_found("message-not-found", &error),
            Error::NoDeadLetter => Problem::not_found("dead-letter-not-found", &error),
            Error::Invalid(errors) => Problem::validation(errors),
            Error::Stale(problem) => problem,
            Error::TooManySecrets(_) => Problem::conflict("too-many-secrets", &error),
            Error::TooManySubscribers(_) => Problem::conflict("too-many-subscribers", &error),
            Error::AlreadyFinal(_) => Problem::conflict("message-settled", &error),
            Error::AlreadyRetried => Problem::conflict("already-retried", &error),
            Error::SubscriberDeleted => Problem::conflict("subscriber-gone", &error),
            Error::EventExpired => Problem::conflict("event-gone", &error),
            Error::Undecryptable => Problem::conflict("subscriber-unopened", &error),
            Error::InvalidSubscriber(_) => Problem::internal(&error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => mailbox::database::problem(&cause),
        }
    }
}
