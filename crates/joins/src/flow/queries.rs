//! Read-only use cases.

use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use uuid::Uuid;

use crate::domain::{Event, Refused, Registration};
use crate::error::Error;
use crate::{Joins, store};

/// The event, or [`Refused::EventNotFound`].
pub(crate) async fn find_event(joins: &Joins, id: Uuid) -> Result<Event, Error> {
    let event = store::find_event(&mut *joins.db.acquire().await?, id).await?;
    Ok(event.ok_or(Refused::EventNotFound)?)
}

/// The error for a caller who is not the organizer. An event that is hidden from the caller does not exist for them.
pub(crate) async fn not_organizer_error(joins: &Joins, event: &Event, user: Option<Uuid>) -> Result<Error, Error> {
    if !event.is_hidden_from(user) {
        return Ok(Error::NotOrganizer);
    }
    let Some(user) = user else { return Ok(Refused::EventNotFound.into()) };
    match store::queries::find_registration(&mut *joins.db.acquire().await?, event.id, user).await? {
        Some(_) => Ok(Error::NotOrganizer),
        None => Ok(Refused::EventNotFound.into()),
    }
}

/// A user's registration, and the number of waitlisted registrations ahead of it if it is waitlisted. Fails if the user
/// has never joined the event, or if the event does not exist for the user.
pub(crate) async fn find_registration(
    joins: &Joins,
    event_id: Uuid,
    user: Uuid,
) -> Result<(Registration, Option<i64>), Error> {
    let mut db = joins.db.acquire().await?;
    if let Some(found) = store::queries::find_registration(&mut db, event_id, user).await? {
        return Ok(found);
    }
    match store::find_event(&mut db, event_id).await? {
        Some(event) if !event.is_hidden_from(Some(user)) => Err(Error::NotRegistered),
        Some(_) | None => Err(Refused::EventNotFound.into()),
    }
}

/// The registrations of an event with this status, by sequence number.
pub(crate) async fn list_of_event(
    joins: &Joins,
    event_id: Uuid,
    status: JoinStatus,
    page: (Option<i64>, u32),
) -> Result<Vec<Registration>, Error> {
    Ok(store::queries::list_of_event(&mut *joins.db.acquire().await?, event_id, status, page).await?)
}

/// The registrations of a user, newest first.
pub(crate) async fn list_of_user(
    joins: &Joins,
    user: Uuid,
    status: Option<JoinStatus>,
    page: (Option<(DateTime<Utc>, Uuid)>, u32),
) -> Result<Vec<Registration>, Error> {
    Ok(store::queries::list_of_user(&mut *joins.db.acquire().await?, user, status, page).await?)
}
