//! The errors of the service, and the problem that each is reported as.

use std::time::Duration;

use chrono::TimeDelta;
use http::{HeaderValue, StatusCode, header};
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::PostError;

use crate::domain::Refused;
use crate::hash_pool::HashError;

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("some fields are invalid")]
    Invalid(Vec<FieldError>),
    #[error("the e-mail address or the password is wrong")]
    WrongCredentials,
    #[error("the stored password was replaced while this one was verified: try again")]
    HashReplaced,
    #[error("the password is wrong")]
    WrongPassword,
    #[error(
        "the e-mail address is not verified yet: open the link in the e-mail, or request another one with POST \
             /identity/v1/verify/resend"
    )]
    NotVerified,
    #[error("too many attempts: try again later")]
    TooManyAttempts(TimeDelta),
    #[error(
        "this token is unknown, was used or has expired: request a new one with POST /identity/v1/verify/resend, or with POST \
         /identity/v1/password/forgot"
    )]
    TokenNotFound,
    #[error("this refresh token is unknown or has expired: sign in again")]
    InvalidRefreshToken,
    #[error("this refresh token was used before, so the session has ended: sign in again")]
    RefreshTokenReused,
    #[error("the session of this token has ended: sign in again")]
    SessionEnded,
    #[error("this token has no account here: sign in with POST /identity/v1/login, and use its access token")]
    NoAccount,
    #[error("this session does not exist")]
    SessionNotFound,
    #[error("this user does not exist")]
    UserNotFound,
    #[error("this subscription does not exist")]
    SubscriptionNotFound,
    #[error("there is a subscription to this plan already: cancel it first")]
    SubscriptionExists,
    #[error("a user has at most {0} subscriptions that have not ended")]
    TooManySubscriptions(i64),
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("it has changed since it was read")]
    PreconditionFailed(Problem),
    #[error("{0}")]
    Hash(#[from] HashError),
    #[error("a token cannot be signed")]
    Unsignable,
    #[error("a message cannot be serialized: {0}")]
    Unserializable(#[from] serde_json::Error),
    #[error("a message cannot be posted: {0}")]
    Post(#[from] PostError),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        // No catch-all arm: a new variant must get a problem type.
        match error {
            Error::Invalid(errors) => Problem::validation(errors),
            Error::WrongCredentials => unauthorized("wrong-credentials", &error),
            // Not stored as the response to an Idempotency-Key, because the credentials may be right.
            Error::HashReplaced => Problem::overloaded(&error, Duration::from_secs(1)),
            Error::InvalidRefreshToken => unauthorized("invalid-refresh-token", &error),
            Error::RefreshTokenReused => unauthorized("refresh-token-reused", &error),
            Error::SessionEnded => Problem::unauthorized(&error),
            Error::NoAccount => Problem::forbidden(&error),
            Error::WrongPassword => Problem::new(StatusCode::FORBIDDEN, "wrong-password", &error),
            Error::NotVerified => Problem::new(StatusCode::FORBIDDEN, "email-not-verified", &error),
            Error::TooManyAttempts(wait) => Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-attempts", &error)
                .retry_after(wait.to_std().unwrap_or(Duration::ZERO)),
            Error::TokenNotFound => Problem::not_found("token-not-found", &error),
            Error::SessionNotFound => Problem::not_found("session-not-found", &error),
            Error::UserNotFound => Problem::not_found("user-not-found", &error),
            Error::SubscriptionNotFound => Problem::not_found("subscription-not-found", &error),
            Error::SubscriptionExists => Problem::conflict("subscription-exists", &error),
            Error::TooManySubscriptions(_) => Problem::conflict("too-many-subscriptions", &error),
            Error::Refused(_) => Problem::conflict("transition-refused", &error),
            Error::PreconditionFailed(problem) => problem,
            Error::Hash(HashError::QueueFull | HashError::CallerQueueFull) => {
                Problem::overloaded(&error, Duration::from_secs(1))
            }
            Error::Hash(HashError::Failed) | Error::Unsignable | Error::Unserializable(_) => Problem::internal(&error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => http_kit::database::problem(&cause),
        }
    }
}

fn unauthorized(code: &'static str, error: &Error) -> Problem {
    let challenge = HeaderValue::from_static("Bearer realm=\"pillarbox\"");
    Problem::new(StatusCode::UNAUTHORIZED, code, error).with_header(header::WWW_AUTHENTICATE, challenge)
}
