//! The errors of the service, and the problem that each is reported as.

use std::time::Duration;

use axum::http::StatusCode;
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::PostError;

use crate::address::InvalidAddress;
use crate::domain::delivery_rules::PREFERENCES_MAX;
use crate::templates::RenderError;

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no such e-mail (any more)")]
    NotFound,
    #[error("only a dead e-mail can be retried")]
    NotDead,
    #[error("this e-mail has expired, and its text was erased; request a new one")]
    Erased,
    #[error("must contain at least one filter, or `all: true`")]
    NoFilter,
    #[error("must not be combined with filters")]
    AllAndFilters,
    /// With the known types.
    #[error("{0}")]
    UnknownType(String),
    #[error("{0}")]
    EventIdConflict(String),
    #[error("another transaction that has posted this event_id has not ended yet: repeat the request")]
    EventInProgress,
    #[error("{0}")]
    UnfitEvent(String),
    #[error("there is no such aggregate type")]
    TypeNotFound,
    #[error("the aggregate type has recipients: remove them first, so that none of them misses its events")]
    TypeInUse,
    #[error("fields are not valid")]
    Invalid(Vec<FieldError>),
    #[error("there is no such notification (any more)")]
    NotificationNotFound,
    #[error("only a dead or skipped notification can be delivered again")]
    NotificationNotDead,
    #[error("there is no such announcement (any more): it is complete")]
    AnnouncementNotFound,
    #[error("only an announcement that was given up can be continued; this one continues by itself")]
    AnnouncementNotGivenUp,
    #[error("there is no such notification in this inbox (any more)")]
    InboxItemNotFound,
    #[error("no rules were set for this event type: the defaults apply")]
    EventTypeNotFound,
    #[error("{0} is critical and cannot be muted: remove it from the request, or mute other event types")]
    CriticalEventType(String),
    #[error("a user may have at most {PREFERENCES_MAX} preferences: remove some first")]
    TooManyPreferences,
    #[error("this link is not valid: use the link of an e-mail, unchanged, or sign in and change the preferences")]
    InvalidUnsubscribeLink,
    #[error("it has changed since it was read")]
    Stale(Problem),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        let field = |pointer: &str| Problem::validation(vec![FieldError::body(pointer, &error)]);
        // No catch-all arm: a new variant must get a problem type.
        match error {
            Error::NotFound => Problem::not_found("mail-not-found", &error),
            Error::NotDead => Problem::conflict("mail-not-dead", &error),
            Error::Erased => Problem::conflict("mail-erased", &error),
            Error::NoFilter => field(""),
            Error::AllAndFilters => field("/all"),
            Error::UnknownType(detail) => Problem::validation(vec![FieldError::body("/aggregate_type", detail)]),
            Error::EventIdConflict(_) => Problem::conflict("event-id-conflict", &error),
            // Not a conflict, which would be the answer to each repetition with the same Idempotency-Key.
            Error::EventInProgress => Problem::new(StatusCode::SERVICE_UNAVAILABLE, "event-in-progress", &error)
                .retry_after(Duration::from_secs(1)),
            Error::UnfitEvent(_) => Problem::bad_request("unfit-event", &error),
            Error::TypeNotFound => Problem::not_found("aggregate-type-not-found", &error),
            Error::TypeInUse => Problem::conflict("aggregate-type-in-use", &error),
            Error::Invalid(errors) => Problem::validation(errors),
            Error::NotificationNotFound => Problem::not_found("notification-not-found", &error),
            Error::NotificationNotDead => Problem::conflict("notification-not-dead", &error),
            Error::AnnouncementNotFound => Problem::not_found("announcement-not-found", &error),
            Error::AnnouncementNotGivenUp => Problem::conflict("announcement-not-given-up", &error),
            Error::InboxItemNotFound => Problem::not_found("notification-not-found", &error),
            Error::EventTypeNotFound => Problem::not_found("event-type-not-found", &error),
            Error::CriticalEventType(_) => Problem::conflict("event-type-critical", &error),
            Error::TooManyPreferences => Problem::conflict("too-many-preferences", &error),
            Error::InvalidUnsubscribeLink => Problem::not_found("unsubscribe-link-invalid", &error),
            Error::Stale(problem) => problem,
            Error::Database(cause) => http_kit::database::problem(&cause),
        }
    }
}

/// Why a round of the delivery failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeliveryError {
    #[error("a hub event cannot be posted: {0}")]
    Post(#[from] PostError),
    #[error("the texts cannot be rendered: {0}")]
    Rendering(String),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

/// Why a message could not be processed. The text contains nothing of the message, which may contain secrets.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error(
        "the payload is not a request for an e-mail: it needs idempotency_key, and data with to, template, variables (a map of \
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

/// Why a message could not become notifications. The text contains nothing of the message, which may contain personal data.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EventError {
    #[error("the business event has no number as aggregate_id")]
    NoAggregate,
    #[error("the payload is not a change of a registration")]
    NoRegistration,
    #[error("the payload is not a change of an event")]
    NoEvent,
    #[error("the payload is not a contact of an account")]
    NoContact,
    #[error("the payload of a notification cannot be encoded")]
    Payload(#[from] serde_json::Error),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

/// Why a round of the sender failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendingError {
    #[error("the mail server cannot be used: {0}")]
    Server(String),
    #[error("e-mails are queued, and no mail server is configured: set smtp_url, as when they were queued")]
    NoServer,
    #[error("e-mails are queued, and no process sends them while mail.shadow is set")]
    Shadow,
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}
