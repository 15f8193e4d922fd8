//! Creating, showing and changing events.

use chrono::{DateTime, Utc};
use contracts::events::{CANCELED, PUBLISHED, SOURCE, UNPUBLISHED, UPDATED};
use kit::etag::IfMatch;
use kit::problem::Problem;
use mailbox::database::problem;
use mailbox::log::{AggregateId, Post, Source, post};
use serde::Serialize;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::Events;
use crate::coalesced_reads::FoundEvent;
use crate::domain::{Action, Event, Status, StatusChange};
use crate::error::Error;
use crate::fields::Fields;
use crate::store::{cities, event as store, generation};

pub(super) const MESSAGE_SOURCE: Source = Source::new(SOURCE);
const AGGREGATE_TYPE: &str = "EVENT";

type Tx<'t> = Transaction<'t, Postgres>;

/// Creates a draft. Fails if a field is missing or invalid.
pub(crate) async fn create(tx: &mut Tx<'_>, user: Uuid, fields: Fields, now: DateTime<Utc>) -> Result<Event, Error> {
    let details = fields.into_details(None).map_err(Error::Invalid)?;
    let event = Event::draft(Uuid::now_v7(), user, details, now);
    store::insert(tx, &event).await?;
    record_status(tx, None, &event, user).await?;
    Ok(event)
}

/// An event as this caller may see it. Fails with [`Error::EventNotFound`] if it is hidden from the caller.
pub(crate) async fn show(events: &Events, user: Option<Uuid>, id: Uuid) -> Result<FoundEvent, Problem> {
    let found = events.event_reader.submit(id).await.map_err(|error| error.into_problem(problem))?;
    match found {
        Some(FoundEvent::Hidden(event)) if Some(event.owner_id) != user => Err(Error::EventNotFound.into()),
        Some(found) => Ok(found),
        None => Err(Error::EventNotFound.into()),
    }
}

/// The events of a user, newest first.
pub(crate) async fn list_mine(
    events: &Events,
    user: Uuid,
    status: Option<Status>,
    page: (Option<(DateTime<Utc>, Uuid)>, u32),
) -> Result<Vec<Event>, Error> {
    Ok(store::list_of_owner(&mut *events.db.acquire().await?, user, status, page).await?)
}

/// The status history of an event, oldest first. Fails if the user is not the owner.
pub(crate) async fn history(
    events: &Events,
    (user, id): (Uuid, Uuid),
    page: (Option<i64>, u32),
) -> Result<Vec<StatusChange>, Error> {
    let mut db = events.db.acquire().await?;
    let event = store::find(&mut db, id).await?.ok_or(Error::EventNotFound)?;
    check_owner(&event, user)?;
    Ok(store::status_changes(&mut db, id, page).await?)
}

/// Changes the given fields; absent ones stay. Returns the old event if nothing differs. Fails if the user is not the
/// owner, the event has changed since `if_match`, it is canceled, or a field is invalid.
pub(crate) async fn update(
    tx: &mut Tx<'_>,
    (user, id): (Uuid, Uuid),
    if_match: &IfMatch,
    fields: Fields,
    now: DateTime<Utc>,
) -> Result<Event, Error> {
    let old = lock(tx, user, id, if_match).await?;
    let mut new = old.after(Action::Update, now)?;
    new.details = fields.into_details(Some(&old.details)).map_err(Error::Invalid)?;
    if new.details == old.details {
        return Ok(old);
    }
    save(tx, &old, &new, user).await?;
    Ok(new)
}

/// Publishes, unpublishes or cancels an event. Fails if the user is not the owner, the event has changed since
/// `if_match`, or its status does not allow the action.
pub(crate) async fn change_status(
    tx: &mut Tx<'_>,
    (user, id): (Uuid, Uuid),
    if_match: &IfMatch,
    action: Action,
    now: DateTime<Utc>,
) -> Result<Event, Error> {
    let old = lock(tx, user, id, if_match).await?;
    let new = old.after(action, now)?;
    save(tx, &old, &new, user).await?;
    Ok(new)
}

/// Locks the event and checks the owner and then the version, so that other users cannot probe the version.
async fn lock(tx: &mut Tx<'_>, user: Uuid, id: Uuid, if_match: &IfMatch) -> Result<Event, Error> {
    let event = store::lock(tx, id).await?.ok_or(Error::EventNotFound)?;
    check_owner(&event, user)?;
    if_match.check(event.version, event.updated_at).map_err(Error::PreconditionFailed)?;
    Ok(event)
}

/// Fails if the user is not the owner. An event that is not public does not exist for other users.
fn check_owner(event: &Event, user: Uuid) -> Result<(), Error> {
    match event.is_public() {
        _ if event.owner_id == user => Ok(()),
        false => Err(Error::EventNotFound),
        true => Err(Error::NotTheOwner),
    }
}

/// Saves the event with its status history, the city counts, the cache generations and the message about the change.
async fn save(tx: &mut Tx<'_>, old: &Event, new: &Event, user: Uuid) -> Result<(), Error> {
    store::update(tx, new).await?;
    if old.status != new.status {
        record_status(tx, Some(old.status), new, user).await?;
    }
    let (was_published, is_published) = (old.status == Status::Published, new.status == Status::Published);
    if was_published || is_published {
        let (old_city, new_city) = (&old.details.city, &new.details.city);
        let changes = match (was_published, is_published) {
            (true, true) if old_city == new_city => Vec::new(),
            (true, true) => vec![(old_city, -1), (new_city, 1)],
            (true, false) => vec![(old_city, -1)],
            (false, _) => vec![(new_city, 1)],
        };
        if cities::add_to_counts(tx, &changes).await? {
            generation::invalidate_cities(tx).await?;
        }
        generation::invalidate_feeds(tx, new.id).await?;
    }
    if let Some(topic) = topic_of_change(old, new.status) {
        post(tx, &MESSAGE_SOURCE, &message(topic, new.id, &new.to_message())?).await?;
    }
    Ok(())
}

/// A message about one event. Its key is the event's id, so that the messages about an event stay in order.
/// Fails if the payload cannot be serialized.
pub(super) fn message(topic: &str, event_id: Uuid, payload: &impl Serialize) -> serde_json::Result<Post> {
    let payload = to_raw_value(payload)?;
    let mut message = Post::new(topic, payload).with_key(event_id.to_string());
    message.aggregate_type = Some(AGGREGATE_TYPE.to_owned());
    message.aggregate_id = Some(AggregateId::Text(event_id.to_string()));
    Ok(message)
}

/// The topic of the message about a change; None if other services must not learn of it: the event is a draft, or was
/// never published before it was canceled.
fn topic_of_change(old: &Event, new: Status) -> Option<&'static str> {
    match (old.status, new) {
        (Status::Draft, Status::Draft) => None,
        (Status::Draft, Status::Canceled) if old.published_at.is_none() => None,
        (Status::Draft | Status::Canceled, Status::Published) => Some(PUBLISHED),
        (Status::Published, Status::Published) => Some(UPDATED),
        (Status::Published | Status::Canceled, Status::Draft) => Some(UNPUBLISHED),
        (_, Status::Canceled) => Some(CANCELED),
    }
}

async fn record_status(tx: &mut Tx<'_>, from: Option<Status>, event: &Event, user: Uuid) -> Result<(), Error> {
    let change = StatusChange { version: event.version, from, to: event.status, by: user, at: event.updated_at };
    Ok(store::insert_status_change(tx, event.id, &change).await?)
}
