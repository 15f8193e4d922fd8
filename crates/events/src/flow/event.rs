//! Creating, showing and changing events.

use chrono::{DateTime, Utc};
use contracts::events::{CANCELED, EventChanged, PUBLISHED, SOURCE, UNPUBLISHED, UPDATED};
use http_kit::auth::Principal;
use http_kit::database::problem;
use http_kit::etag::IfMatch;
use http_kit::problem::Problem;
use pillarbox::consumers::LocalDelivery;
use pillarbox::log::{AggregateId, Post, Source, post};
use serde::Serialize;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::Events;
use crate::coalesced_reads::FoundEvent;
use crate::domain::{Action, Actor, Event, Status, StatusChange};
use crate::error::Error;
use crate::fields::Fields;
use crate::store::audit::{self, AuditFilter, AuditPosition};
use crate::store::{cities, event as store, generation};

pub(super) const MESSAGE_SOURCE: Source = Source::new(SOURCE);
const AGGREGATE_TYPE: &str = "EVENT";

pub(super) type Tx<'t> = Transaction<'t, Postgres>;

/// A request to change an event.
pub(crate) struct RequestedChange {
    pub(crate) actor: Actor,
    pub(crate) event_id: Uuid,
    pub(crate) action: Action,
    pub(crate) if_match: IfMatch,
    /// Required of an admin who acts on the event of another user.
    pub(crate) reason: Option<String>,
    /// The messages about the change, for which the response waits.
    pub(crate) delivery: LocalDelivery,
}

/// Creates a draft. Fails if a field is missing or invalid.
pub(crate) async fn create(tx: &mut Tx<'_>, user: Uuid, fields: Fields, now: DateTime<Utc>) -> Result<Event, Error> {
    let details = fields.into_details(None).map_err(Error::Invalid)?;
    let event = Event::draft(Uuid::now_v7(), user, details, now);
    store::insert(tx, &event).await?;
    record_status(tx, None, &event, Principal::User(user), None).await?;
    Ok(event)
}

/// An event as this caller may see it. Fails with [`Error::EventNotFound`] if it is hidden from the caller.
pub(crate) async fn show(events: &Events, caller: Option<Actor>, id: Uuid) -> Result<FoundEvent, Problem> {
    let found = events.event_reader.submit(id).await.map_err(|error| Problem::of_batch(error, problem))?;
    match found {
        Some(FoundEvent::Hidden(event)) if !caller.is_some_and(|caller| caller.sees(&event)) => {
            Err(Error::EventNotFound.into())
        }
        Some(found) => Ok(found),
        None => Err(Error::EventNotFound.into()),
    }
}

/// The events of a user, newest first.
pub(crate) async fn list_mine(
    events: &Events,
    user: Uuid,
    status: Option<Status>,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> Result<Vec<Event>, Error> {
    Ok(store::list_of_owner(&mut *events.db.acquire().await?, user, status, before, limit).await?)
}

/// Fails if the caller may not do this with the event. It is checked again when the event is locked; this check is made
/// before the rest of the request is read.
pub(crate) async fn check(events: &Events, actor: Actor, id: Uuid, action: Action) -> Result<(), Error> {
    let event = store::find(&mut *events.db.acquire().await?, id).await?.ok_or(Error::EventNotFound)?;
    check_permission(&event, actor, action)
}

/// The status history of an event, oldest first. Fails if the caller is neither the owner nor an admin.
pub(crate) async fn history(
    events: &Events,
    actor: Actor,
    id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> Result<Vec<StatusChange>, Error> {
    let mut db = events.db.acquire().await?;
    let event = store::find(&mut db, id).await?.ok_or(Error::EventNotFound)?;
    if actor.is_admin || actor.owns(&event) {
        Ok(store::status_changes(&mut db, id, after, limit).await?)
    } else {
        Err(refusal(&event, actor))
    }
}

/// The status changes of all events, newest first, for admins.
pub(crate) async fn audit(
    events: &Events,
    filter: &AuditFilter,
    before: Option<AuditPosition>,
    limit: u32,
) -> Result<Vec<StatusChange>, Error> {
    Ok(audit::list(&mut *events.db.acquire().await?, filter, before, limit).await?)
}

/// Changes the given fields; absent ones stay. Returns the old event if nothing differs. Fails if the user is not the
/// owner, the event has changed since `if_match`, it is canceled, or a field is invalid.
pub(crate) async fn update(
    tx: &mut Tx<'_>,
    change: &RequestedChange,
    fields: Fields,
    now: DateTime<Utc>,
) -> Result<Event, Error> {
    let old = lock(tx, change).await?;
    let mut new = old.after(change.action, now)?;
    new.details = fields.into_details(Some(&old.details)).map_err(Error::Invalid)?;
    if new.details == old.details {
        return Ok(old);
    }
    save(tx, &old, &new, change).await?;
    Ok(new)
}

/// Publishes, unpublishes or cancels an event. Fails if the caller may not do this, an admin gives no reason, the event has
/// changed since `if_match`, or its status does not allow the action.
pub(crate) async fn change_status(
    tx: &mut Tx<'_>,
    change: &RequestedChange,
    now: DateTime<Utc>,
) -> Result<Event, Error> {
    let old = lock(tx, change).await?;
    if change.reason.is_none() && !change.actor.owns(&old) {
        return Err(Error::ReasonRequired);
    }
    let new = old.after(change.action, now)?;
    save(tx, &old, &new, change).await?;
    Ok(new)
}

/// Locks the event and checks the permission and then the version, so that other users cannot probe the version.
pub(super) async fn lock(tx: &mut Tx<'_>, change: &RequestedChange) -> Result<Event, Error> {
    let event = store::lock(tx, change.event_id).await?.ok_or(Error::EventNotFound)?;
    check_permission(&event, change.actor, change.action)?;
    change.if_match.check(event.version, event.updated_at).map_err(Error::PreconditionFailed)?;
    Ok(event)
}

fn check_permission(event: &Event, actor: Actor, action: Action) -> Result<(), Error> {
    if actor.may(action, event) { Ok(()) } else { Err(refusal(event, actor)) }
}

/// The error for a caller without permission. An event that the caller may not see does not exist for them.
fn refusal(event: &Event, actor: Actor) -> Error {
    if actor.sees(event) { Error::NotTheOwner } else { Error::EventNotFound }
}

/// Saves the event with its status history, the city counts, the cache generations and the message about the change.
pub(super) async fn save(tx: &mut Tx<'_>, old: &Event, new: &Event, change: &RequestedChange) -> Result<(), Error> {
    store::update(tx, new).await?;
    if old.status != new.status || old.owner_id != new.owner_id {
        record_status(tx, Some(old.status), new, change.actor.principal, change.reason.clone()).await?;
    }
    let (was_published, is_published) = (old.status == Status::Published, new.status == Status::Published);
    if was_published || is_published {
        let (old_city, new_city) = (&old.details.city, &new.details.city);
        let mut changes = Vec::new();
        if !(was_published && is_published && old_city == new_city) {
            changes.extend(was_published.then_some((old_city, -1)));
            changes.extend(is_published.then_some((new_city, 1)));
        }
        if cities::add_to_counts(tx, &changes).await? {
            generation::invalidate_cities(tx).await?;
        }
        generation::invalidate_feeds(tx, new.id).await?;
    }
    if let Some(topic) = topic_of_change(old, new) {
        let is_moderated = !change.actor.owns(new);
        let payload = EventChanged {
            reason: change.reason.clone().filter(|_| old.status != new.status),
            by: is_moderated.then(|| change.actor.principal.to_string()),
            ..new.to_message()
        };
        let message = message(topic, new.id, &payload)?;
        let id = post(tx, &MESSAGE_SOURCE, &message).await?;
        change.delivery.expect(tx, &MESSAGE_SOURCE, id, &message).await?;
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
/// never published before it was canceled. Only its owner and admins have seen such an event, and the message would show it.
fn topic_of_change(old: &Event, new: &Event) -> Option<&'static str> {
    match (old.status, new.status) {
        // Joins knows the event, and must know its organizer.
        (Status::Draft, Status::Draft) if old.published_at.is_some() && old.owner_id != new.owner_id => {
            Some(UNPUBLISHED)
        }
        (Status::Draft, Status::Draft) => None,
        (Status::Draft, Status::Canceled) if old.published_at.is_none() => None,
        (Status::Draft | Status::Canceled, Status::Published) => Some(PUBLISHED),
        (Status::Published, Status::Published) => Some(UPDATED),
        (Status::Published | Status::Canceled, Status::Draft) => Some(UNPUBLISHED),
        (_, Status::Canceled) => Some(CANCELED),
    }
}

async fn record_status(
    tx: &mut Tx<'_>,
    from: Option<Status>,
    event: &Event,
    by: Principal,
    reason: Option<String>,
) -> Result<(), Error> {
    let (event_id, version, at) = (event.id, event.version, event.updated_at);
    let change = StatusChange { event_id, version, from, to: event.status, by, reason, at };
    Ok(store::insert_status_change(tx, &change).await?)
}
