//! Another owner for an event, and the events of deleted accounts.

use chrono::{DateTime, TimeDelta, Utc};
use http_kit::auth::Principal;
use http_kit::etag::IfMatch;
use pillarbox::consumers::LocalDelivery;
use pillarbox::database::{Database, time};
use runtime::worker::Round;
use uuid::Uuid;

use super::event::{RequestedChange, Tx, lock, save};
use crate::domain::{Action, Actor, Event};
use crate::error::Error;
use crate::store::{event as store, handover};

/// The events of a deleted account that one transaction cancels or deletes.
const STEP: i64 = 50;
/// An access token is valid for some minutes after the account is deleted: then the events are looked at again.
const TOKEN_TIME: TimeDelta = TimeDelta::minutes(10);
/// The reason of these cancellations, which the notification of the participants contains.
const ACCOUNT_DELETED: &str = "The account of the organizer was deleted.";

/// Offers an event to a user, who becomes the owner when they accept. It replaces an earlier offer; an offer to the owner only
/// withdraws it. Fails if the caller may not do this, an admin gives no reason, or the event is canceled.
pub(crate) async fn offer(
    tx: &mut Tx<'_>,
    change: &RequestedChange,
    user: Uuid,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let event = lock(tx, change).await?;
    if change.reason.is_none() && !change.actor.owns(&event) {
        return Err(Error::ReasonRequired);
    }
    if user == event.owner_id {
        return Ok(handover::withdraw_offer(tx, event.id).await?);
    }
    event.after(Action::HandOver, now)?;
    Ok(handover::offer(tx, event.id, user, now).await?)
}

/// Makes a user, to whom the event was offered, its owner. Fails if it was not offered, or is canceled now.
pub(crate) async fn accept(
    tx: &mut Tx<'_>,
    user: Uuid,
    event_id: Uuid,
    delivery: LocalDelivery,
    now: DateTime<Utc>,
) -> Result<Event, Error> {
    let old = store::lock(tx, event_id).await?.ok_or(Error::EventNotFound)?;
    if !handover::delete_offer(tx, event_id, user).await? {
        return Err(Error::NotOffered);
    }
    let new = Event { owner_id: user, ..old.after(Action::HandOver, now)? };
    let change = RequestedChange {
        reason: Some(format!("Handed over by {}.", Principal::User(old.owner_id))),
        ..of_owner(user, event_id, Action::HandOver, delivery)
    };
    save(tx, &old, &new, &change).await?;
    Ok(new)
}

/// Records that the account of a user was deleted. [`close_next`] closes the events, in steps, however many there are.
pub(crate) async fn record_deleted(tx: &mut Tx<'_>, user: Uuid) -> Result<(), sqlx::Error> {
    handover::insert_deleted_owners(tx, &[user]).await
}

/// Cancels the next events of a deleted account that have not ended, which notifies their participants, and deletes those that
/// were never published. Others stay. Fails if the database fails.
pub(crate) async fn close_next(db: &Database, delivery: LocalDelivery) -> Result<Round, Error> {
    let mut tx = db.begin().await?;
    let Some((user, deleted_at)) = handover::lock_deleted_owner(&mut tx).await? else { return Ok(Round::Idle) };
    let now = time::now(&mut tx).await?;
    let events = handover::lock_open_events(&mut tx, user, now, STEP).await?;
    let is_last = (events.len() as i64) < STEP;
    let (public, drafts): (Vec<_>, Vec<_>) = events.into_iter().partition(|event| event.published_at.is_some());
    for old in public {
        let new = old.after(Action::Cancel, now)?;
        let reason = Some(ACCOUNT_DELETED.to_owned());
        let change = RequestedChange { reason, ..of_owner(user, old.id, Action::Cancel, delivery.clone()) };
        save(&mut tx, &old, &new, &change).await?;
    }
    let drafts: Vec<Uuid> = drafts.iter().map(|event| event.id).collect();
    handover::delete_drafts(&mut tx, &drafts).await?;
    if is_last && now - deleted_at >= TOKEN_TIME {
        handover::delete_owner(&mut tx, user).await?;
    } else {
        let pause = if is_last { TOKEN_TIME } else { TimeDelta::zero() };
        handover::postpone_deleted_owner(&mut tx, user, pause).await?;
    }
    tx.commit().await?;
    Ok(Round::Busy)
}

fn of_owner(user: Uuid, event_id: Uuid, action: Action, delivery: LocalDelivery) -> RequestedChange {
    let actor = Actor { principal: Principal::User(user), is_admin: false };
    RequestedChange { actor, event_id, action, if_match: IfMatch::default(), reason: None, delivery }
}
