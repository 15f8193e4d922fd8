use chrono::{DateTime, Utc};
use contracts::events::{CANCELED, PUBLISHED, SOURCE, UNPUBLISHED, UPDATED};
use kit::etag::IfMatch;
use kit::problem::Problem;
use mailbox::database::problem;
use mailbox::post::{AggregateId, Post, Source, post};
use serde::Serialize;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::Events;
use crate::domain::{Action, Event, Status, StatusChange};
use crate::error::Error;
use crate::fields::Fields;
use crate::reads::Seen;
use crate::store::{cities, event as store, feed};

pub(super) const POSTED_BY: Source = Source::new(SOURCE);
const AGGREGATE_TYPE: &str = "EVENT";

type Tx<'t> = Transaction<'t, Postgres>;

/// A draft of this user.
pub(crate) async fn create(tx: &mut Tx<'_>, user: Uuid, fields: Fields, now: DateTime<Utc>) -> Result<Event, Error> {
    let details = fields.settle(None).map_err(Error::Invalid)?;
    let event = Event::draft(Uuid::now_v7(), user, details, now);
    store::insert(tx, &event).await?;
    note(tx, None, &event, user).await?;
    Ok(event)
}

/// An event as it is for this caller; what is hidden from them is not there.
pub(crate) async fn show(events: &Events, user: Option<Uuid>, id: Uuid) -> Result<Seen, Problem> {
    let seen = events.details.submit(id).await.map_err(|refused| refused.into_problem(problem))?;
    match seen {
        Some(Seen::Hidden(event)) if Some(event.owner_id) != user => Err(Error::NoEvent.into()),
        Some(seen) => Ok(seen),
        None => Err(Error::NoEvent.into()),
    }
}

/// Newest first, behind `before`.
pub(crate) async fn list_mine(
    events: &Events,
    user: Uuid,
    status: Option<Status>,
    page: (Option<(DateTime<Utc>, Uuid)>, u32),
) -> Result<Vec<Event>, Error> {
    Ok(store::of_owner(&mut *events.db.acquire().await?, user, status, page).await?)
}

/// The audit trail, oldest first, for its owner.
pub(crate) async fn history(
    events: &Events,
    (user, id): (Uuid, Uuid),
    page: (Option<i64>, u32),
) -> Result<Vec<StatusChange>, Error> {
    let mut db = events.db.acquire().await?;
    let event = store::find(&mut db, id).await?.ok_or(Error::NoEvent)?;
    owned_by(&event, user)?;
    Ok(store::changes(&mut db, id, page).await?)
}

/// Fields that are absent stay.
pub(crate) async fn update(
    tx: &mut Tx<'_>,
    (user, id): (Uuid, Uuid),
    if_match: &IfMatch,
    fields: Fields,
    now: DateTime<Utc>,
) -> Result<Event, Error> {
    let old = locked(tx, user, id, if_match).await?;
    let mut new = old.after(Action::Update, now)?;
    new.details = fields.settle(Some(&old.details)).map_err(Error::Invalid)?;
    if new.details == old.details {
        return Ok(old);
    }
    keep(tx, &old, &new, user).await?;
    Ok(new)
}

/// Publishes, unpublishes or cancels.
pub(crate) async fn act(
    tx: &mut Tx<'_>,
    (user, id): (Uuid, Uuid),
    if_match: &IfMatch,
    action: Action,
    now: DateTime<Utc>,
) -> Result<Event, Error> {
    let old = locked(tx, user, id, if_match).await?;
    let new = old.after(action, now)?;
    keep(tx, &old, &new, user).await?;
    Ok(new)
}

/// First who may, then what: a stranger does not learn a version.
async fn locked(tx: &mut Tx<'_>, user: Uuid, id: Uuid, if_match: &IfMatch) -> Result<Event, Error> {
    let event = store::lock(tx, id).await?.ok_or(Error::NoEvent)?;
    owned_by(&event, user)?;
    if_match.check(event.version).map_err(Error::Stale)?;
    Ok(event)
}

/// Nobody but its owner knows of what is not public.
fn owned_by(event: &Event, user: Uuid) -> Result<(), Error> {
    match event.is_public() {
        _ if event.owner_id == user => Ok(()),
        false => Err(Error::NoEvent),
        true => Err(Error::NotTheOwner),
    }
}

/// The change, its trail, what follows from it, and the news of it.
async fn keep(tx: &mut Tx<'_>, old: &Event, new: &Event, user: Uuid) -> Result<(), Error> {
    store::update(tx, new).await?;
    if old.status != new.status {
        note(tx, Some(old.status), new, user).await?;
    }
    let (was_public, is_public) = (old.status == Status::Published, new.status == Status::Published);
    if was_public || is_public {
        let (left, came) = (&old.details.city, &new.details.city);
        let moves = match (was_public, is_public) {
            (true, true) if left == came => Vec::new(),
            (true, true) => vec![(left, -1), (came, 1)],
            (true, false) => vec![(left, -1)],
            (false, _) => vec![(came, 1)],
        };
        if cities::count(tx, &moves).await? {
            feed::outdate_cities(tx).await?;
        }
        feed::outdate(tx, new.id).await?;
    }
    if let Some(topic) = news(old, new.status) {
        post(tx, &POSTED_BY, &message(topic, new.id, &new.told())?).await?;
    }
    Ok(())
}

/// About one event: in order with all others about it.
pub(super) fn message(topic: &str, event_id: Uuid, payload: &impl Serialize) -> sqlx::Result<Post> {
    let payload = to_raw_value(payload).map_err(|error| sqlx::Error::Encode(error.into()))?;
    let mut message = Post::new(topic, payload).with_key(event_id.to_string());
    message.aggregate_type = Some(AGGREGATE_TYPE.to_owned());
    message.aggregate_id = Some(AggregateId::Text(event_id.to_string()));
    Ok(message)
}

/// What others hear. A draft's changes are nobody's business yet, and one that was never published never becomes it.
fn news(old: &Event, new: Status) -> Option<&'static str> {
    match (old.status, new) {
        (Status::Draft, Status::Draft) => None,
        (Status::Draft, Status::Canceled) if old.published_at.is_none() => None,
        (Status::Draft | Status::Canceled, Status::Published) => Some(PUBLISHED),
        (Status::Published, Status::Published) => Some(UPDATED),
        (Status::Published | Status::Canceled, Status::Draft) => Some(UNPUBLISHED),
        (_, Status::Canceled) => Some(CANCELED),
    }
}

async fn note(tx: &mut Tx<'_>, from: Option<Status>, event: &Event, user: Uuid) -> Result<(), Error> {
    let change = StatusChange { version: event.version, from, to: event.status, by: user, at: event.updated_at };
    Ok(store::add_change(tx, event.id, &change).await?)
}
