//! Business events of other applications, and the aggregate types that they can be about.

use std::time::Duration;

use http_kit::admission::gates::Gates;
use http_kit::problem::FieldError;
use pillarbox::database::Database;
use pillarbox::log::{self, BusinessEvent, BusinessEventError};
use sqlx::{Postgres, Transaction};
use tokio::sync::OwnedSemaphorePermit;
use uuid::Uuid;

use crate::error::Error;
use crate::store::recipients as store;

/// How long a request waits for others with the same event id.
const TURN_WAIT_MAX: Duration = Duration::from_secs(2);

/// Posts a business event. Returns the id of its message.
pub(crate) async fn post(tx: &mut Transaction<'_, Postgres>, event: &BusinessEvent) -> Result<Uuid, Error> {
    log::post_business_event(tx, event).await.map_err(|error| match error {
        BusinessEventError::UnknownType(_) => Error::UnknownType(error.to_string()),
        BusinessEventError::Conflict => Error::EventIdConflict(error.to_string()),
        BusinessEventError::InProgress => Error::EventInProgress,
        BusinessEventError::Invalid(_) => Error::UnfitEvent(error.to_string()),
        BusinessEventError::Database(cause) => Error::Database(cause),
    })
}

/// Waits until no other request of this process posts the same event id: one of them may wait for a transaction of the
/// producer, and the others must not wait for it with a connection each.
pub(crate) async fn wait_for_turn(
    gates: &Gates<String>,
    event_id: &str,
) -> Result<Option<OwnedSemaphorePermit>, Error> {
    // A UUID is the same id in all its forms.
    let event_id = event_id.to_lowercase();
    let turn = gates.enter(event_id.strip_prefix("evt_").unwrap_or(&event_id));
    tokio::time::timeout(TURN_WAIT_MAX, turn).await.map_err(|_| Error::EventInProgress)
}

/// The error of an aggregate type that does not exist. It is part of the errors of an event with other invalid fields; an event
/// without them is checked when it is posted.
pub(crate) async fn unknown_type(db: &Database, name: Option<String>) -> Result<Option<FieldError>, Error> {
    let Some(name) = name else { return Ok(None) };
    let known = log::aggregate_types(&mut *db.acquire().await?).await?;
    let detail = || format!("is unknown. Known types: {}", known.join(", "));
    Ok((!known.contains(&name)).then(|| FieldError::body("/aggregate_type", detail())))
}

/// Adds an aggregate type. Returns false if it exists.
pub(crate) async fn add_type(tx: &mut Transaction<'_, Postgres>, name: &str) -> Result<bool, Error> {
    Ok(log::add_aggregate_type(tx, name).await?)
}

/// Deletes an aggregate type, unless it has recipients: its events that are still to be processed would have no recipients.
pub(crate) async fn delete_type(tx: &mut Transaction<'_, Postgres>, name: &str) -> Result<(), Error> {
    if !log::delete_aggregate_type(tx, name).await? {
        return Err(Error::TypeNotFound);
    }
    if store::has_recipients(tx, name).await? { Err(Error::TypeInUse) } else { Ok(()) }
}
