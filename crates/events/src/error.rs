//! The errors of the service, and the problem that each is reported as.

use std::time::Duration;

use http::StatusCode;
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::PostError;

use crate::domain::Refused;

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("this event does not exist")]
    EventNotFound,
    #[error("this event belongs to another user: only its owner may change it, and admins may unpublish or cancel it")]
    NotTheOwner,
    #[error("this event was not offered to you: its owner offers it with POST /event/v1/events/{{id}}/handover")]
    NotOffered,
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("an admin must give a reason for acting on the event of another user")]
    ReasonRequired,
    #[error("some fields are invalid")]
    Invalid(Vec<FieldError>),
    #[error("the event has changed since it was read")]
    PreconditionFailed(Problem),
    #[error("the list that this cursor belongs to has expired; start again without a cursor")]
    CursorExpired,
    #[error("q cannot be parsed as a search; use fewer operators")]
    Unsearchable,
    #[error("the search takes longer than {0:?}: use rarer words, or add a city, a category or a time range")]
    SearchTooBroad(Duration),
    #[error(
        "too many searches are running, in total or for this user or address: send fewer at the same time, or this one again later"
    )]
    TooManySearches,
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
            Error::EventNotFound => Problem::not_found("event-not-found", &error),
            Error::NotOffered => Problem::not_found("not-offered", &error),
            Error::NotTheOwner => Problem::forbidden(&error),
            Error::Refused(Refused::Transition { .. }) => Problem::conflict("transition-refused", &error),
            Error::Refused(Refused::Ended(_)) => Problem::conflict("event-ended", &error),
            Error::ReasonRequired => Problem::validation(vec![FieldError::body(
                "/reason",
                "is required of an admin who acts on the event of another user",
            )]),
            Error::Invalid(errors) => Problem::validation(errors),
            Error::PreconditionFailed(problem) => problem,
            Error::Unsearchable => {
                http_kit::extract::query_problem("/q", "cannot be parsed as a search; use fewer operators")
            }
            Error::SearchTooBroad(_) => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "search-too-broad", &error),
            Error::TooManySearches => Problem::overloaded(&error, Duration::from_secs(1)),
            Error::CursorExpired => Problem::new(StatusCode::GONE, "cursor-expired", &error),
            Error::Unserializable(_) => Problem::internal(&error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => http_kit::database::problem(&cause),
        }
    }
}
