//! Read-only use cases.

use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use uuid::Uuid;

use crate::domain::{Ban, Event, Refused, Registration, RegistrationOfUser, StoredEntry, WaitlistEntry};
use crate::error::Error;
use crate::store::moderation::{AuditFilter, AuditPosition};
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

/// A user's registration as the user sees it. Fails if the user has never joined the event, or if the event does not exist
/// for the user.
pub(crate) async fn find_registration(joins: &Joins, event_id: Uuid, user: Uuid) -> Result<RegistrationOfUser, Error> {
    let mut db = joins.db.acquire().await?;
    if let Some(found) = store::queries::find_registration(&mut db, event_id, user).await? {
        return Ok(found);
    }
    match store::find_event(&mut db, event_id).await? {
        Some(event) if !event.is_hidden_from(Some(user)) => Err(Error::NotRegistered),
        Some(_) | None => Err(Refused::EventNotFound.into()),
    }
}

/// The active registrations of an event, by sequence number.
pub(crate) async fn participants(
    joins: &Joins,
    event_id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> Result<Vec<Registration>, Error> {
    Ok(store::queries::participants(&mut *joins.db.acquire().await?, event_id, after, limit).await?)
}

/// The waitlisted registrations of an event, by sequence number.
pub(crate) async fn waitlist(
    joins: &Joins,
    event_id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> Result<Vec<WaitlistEntry>, Error> {
    Ok(store::queries::waitlist(&mut *joins.db.acquire().await?, event_id, after, limit).await?)
}

/// The bans of an event that are in force, newest first.
pub(crate) async fn bans(
    joins: &Joins,
    event_id: Uuid,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> Result<Vec<Ban>, Error> {
    let now = joins.clock.now();
    Ok(store::moderation::bans(&mut *joins.db.acquire().await?, event_id, now, before, limit).await?)
}

/// The history of an event, oldest first.
pub(crate) async fn history(
    joins: &Joins,
    event_id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> Result<Vec<StoredEntry>, Error> {
    Ok(store::moderation::history(&mut *joins.db.acquire().await?, event_id, after, limit).await?)
}

/// The moderation of all events, newest first, for admins.
pub(crate) async fn audit(
    joins: &Joins,
    filter: &AuditFilter,
    before: Option<AuditPosition>,
    limit: u32,
) -> Result<Vec<StoredEntry>, Error> {
    Ok(store::moderation::audit(&mut *joins.db.acquire().await?, filter, before, limit).await?)
}

/// The registrations of a user, newest first.
pub(crate) async fn list_of_user(
    joins: &Joins,
    user: Uuid,
    status: Option<JoinStatus>,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> Result<Vec<RegistrationOfUser>, Error> {
    Ok(store::queries::list_of_user(&mut *joins.db.acquire().await?, user, status, before, limit).await?)
}
