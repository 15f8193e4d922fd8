//! Looking, without changing anything.

use chrono::{DateTime, Utc};
use contracts::joins::JoinStatus;
use uuid::Uuid;

use crate::Joins;
use crate::domain::{Entry, Event, Refused};
use crate::error::Error;
use crate::store;

pub(crate) async fn event(joins: &Joins, id: Uuid) -> Result<Event, Error> {
    let event = store::event(&mut *joins.db.acquire().await?, id).await?;
    Ok(event.ok_or(Refused::NoEvent)?)
}

/// Why someone is refused who does not organize it: what is hidden from them is not there.
pub(crate) async fn not_organizer(joins: &Joins, event: &Event, user: Option<Uuid>) -> Result<Error, Error> {
    if !event.is_hidden_from(user) {
        return Ok(Error::NotOrganizer);
    }
    let Some(user) = user else { return Ok(Refused::NoEvent.into()) };
    match store::list::place(&mut *joins.db.acquire().await?, event.id, user).await? {
        Some(_) => Ok(Error::NotOrganizer),
        None => Ok(Refused::NoEvent.into()),
    }
}

/// With how many of the waitlist are before them, if they are on it.
pub(crate) async fn place(joins: &Joins, event_id: Uuid, user: Uuid) -> Result<(Entry, Option<i64>), Error> {
    let mut db = joins.db.acquire().await?;
    if let Some(place) = store::list::place(&mut db, event_id, user).await? {
        return Ok(place);
    }
    match store::event(&mut db, event_id).await? {
        Some(event) if !event.is_hidden_from(Some(user)) => Err(Error::NotRegistered),
        Some(_) | None => Err(Refused::NoEvent.into()),
    }
}

pub(crate) async fn people(
    joins: &Joins,
    event_id: Uuid,
    status: JoinStatus,
    part: (Option<i64>, u32),
) -> Result<Vec<Entry>, Error> {
    Ok(store::list::of_event(&mut *joins.db.acquire().await?, event_id, status, part).await?)
}

pub(crate) async fn registrations(
    joins: &Joins,
    user: Uuid,
    status: Option<JoinStatus>,
    part: (Option<(DateTime<Utc>, Uuid)>, u32),
) -> Result<Vec<Entry>, Error> {
    Ok(store::list::of_user(&mut *joins.db.acquire().await?, user, status, part).await?)
}
