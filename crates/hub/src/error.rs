use kit::problem::{FieldError, Problem};
use mailbox::post::PostError;

use crate::domain::Outcome;

/// What a people's request can end with, besides an answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no such subscriber")]
    NoSubscriber,
    #[error(
        "there is no such event of the hub, or it is not kept any more (dead letters keep theirs; events posted in SQL are at `/admin/v1/log/{{id}}`)"
    )]
    NoEvent,
    #[error("there is no such message, or it is not kept any more; dead letters keep theirs")]
    NoMessage,
    #[error("there is no such dead letter")]
    NoDeadLetter,
    #[error("fields are not what they should be")]
    Invalid(Vec<FieldError>),
    #[error("it was changed meanwhile")]
    Stale(Problem),
    #[error(
        "it has {0} secrets already: wait until one ends, or say `overlap_hours: 0`, which ends all before the new one"
    )]
    TooManySecrets(usize),
    #[error("a tenant has at most {0} subscribers: delete those that are no longer needed")]
    TooManySubscribers(i64),
    #[error("it is {0} already")]
    Settled(Outcome),
    #[error("it was retried already; if it dies again, that can be retried again")]
    AlreadyRetried,
    #[error("its subscriber is not there any more, so it cannot be sent again")]
    SubscriberGone,
    #[error("the log no longer had its event when it died, so there is nothing to send")]
    EventGone,
    #[error(
        "its headers and secrets cannot be opened with the keys that this instance has (`secret_keys_previous`): it can be deleted, and made anew"
    )]
    Unopened,
    #[error("a subscriber cannot be sent to: {0}")]
    Unusable(String),
    #[error("post: {0}")]
    Post(#[from] PostError),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl Error {
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
            Error::Settled(_) => Problem::conflict("message-settled", &error),
            Error::AlreadyRetried => Problem::conflict("already-retried", &error),
            Error::SubscriberGone => Problem::conflict("subscriber-gone", &error),
            Error::EventGone => Problem::conflict("event-gone", &error),
            Error::Unopened => Problem::conflict("subscriber-unopened", &error),
            Error::Unusable(_) => Problem::internal(&error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => mailbox::database::problem(&cause),
        }
    }
}
