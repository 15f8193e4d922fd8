//! Notifies users of their registrations, and of changes of the events that they have joined.
//!
//! Each fact is one notification. When an event is canceled, joins expires its registrations, and each of these messages leads to the
//! notification about the cancellation, which exists once for each person. The messages of the two services take different ways:
//! one of joins may arrive before that about its event. Then the participant is saved, and the text waits for the event.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::{EventChanged, EventStatus};
use contracts::joins::JoinChanged;
use pillarbox::database::Database;
use pillarbox::log::Message;
use runtime::worker::Round;
use serde_json::value::{RawValue, to_raw_value};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::expansion::{Addressed, record};
use crate::domain::business_event::BusinessEvent;
use crate::domain::participants::{
    EventFacts, Fact, JoinableEvent, Participation, Previous, Registration, UnknownEventFacts, concerns_user,
    is_moderation,
};
use crate::domain::policy::{Cause, Policy};
use crate::error::EventError;
use crate::store::announcements;
use crate::store::participants::{self as store, Lock};

/// How long a message about a registration waits for that about its event. After that, its text names no event.
const WAIT_MAX: TimeDelta = TimeDelta::hours(1);
/// The pause between two checks of a message that waits. The message about the event ends the wait earlier.
const WAIT_PAUSE: TimeDelta = TimeDelta::seconds(10);
/// Messages that waited and are processed in one transaction.
const WAITING_BATCH: i64 = 500;

/// Saves the participants, and records the notifications about registrations, unless they have to wait for their events.
pub(crate) async fn notify_of_registrations(
    tx: &mut Transaction<'static, Postgres>,
    policy: &Policy,
    messages: &[&Message],
) -> Result<(), EventError> {
    let changes =
        messages.iter().map(|message| registration_of(message.payload.get())).collect::<Result<Vec<_>, _>>()?;
    let ids: Vec<Uuid> = changes.iter().map(|change| change.event_id).collect();
    // While the lock is held, no change of the event is announced: a participant whom an announcement does not find
    // learns the new time from the confirmation.
    let events = store::lock_events(tx, &ids, Lock::Share).await?;
    let mut waiting_users = store::waiting_users(tx, &ids).await?;
    let since = store::facts_since(tx).await?;
    let (mut addressed, mut waiting): (Vec<Addressed>, Vec<(&Message, &JoinChanged)>) = Default::default();
    let mut participants: BTreeMap<(Uuid, Uuid), Registration> = BTreeMap::new();
    for (message, change) in messages.iter().zip(&changes) {
        // Banned without ever having joined.
        if change.join_id.is_none() && !concerns_user(&message.topic, change) {
            continue;
        }
        let (new, user) = (Registration::after(&message.topic, change), (change.event_id, change.user_id));
        if participants.get(&user).is_none_or(|known| known.version <= new.version) {
            participants.insert(user, new);
        }
        if change.occurred_at < since || !concerns_user(&message.topic, change) {
            continue;
        }
        let event = events.get(&change.event_id).filter(|_| !waiting_users.contains(&user));
        match registration_event(message.message_id, &message.topic, change, event)? {
            Some((event, cause)) => addressed.push(Addressed { event, users: vec![change.user_id], cause }),
            None => {
                // The later messages about the user also wait: the inbox has their order.
                waiting_users.insert(user);
                waiting.push((message, change));
            }
        }
    }
    let has_joined = |one: &&Registration| one.status != Participation::Left;
    let joined: Vec<Uuid> = participants.values().filter(has_joined).map(|one| one.event_id).collect();
    store::save_participants(tx, &participants.into_values().collect::<Vec<_>>()).await?;
    announcements::note_joined(tx, &joined).await?;
    if !waiting.is_empty() {
        store::wait_for_events(tx, &waiting, WAIT_PAUSE).await?;
    }
    record(tx, policy, addressed).await
}

/// Records the notifications about registrations whose events are known now, and those that have waited for too long. Fails if
/// the database fails.
pub(crate) async fn notify_of_waiting(db: &Database, policy: &Policy) -> Result<Round, EventError> {
    let mut tx = db.begin().await?;
    if !store::lock_waiting(&mut tx).await? {
        return Ok(Round::Idle);
    }
    let waiting = store::due_registrations(&mut tx, WAIT_MAX, WAITING_BATCH).await?;
    if waiting.is_empty() {
        return Ok(Round::Idle);
    }
    let changes = waiting.iter().map(|one| registration_of(&one.payload)).collect::<Result<Vec<_>, _>>()?;
    let ids: Vec<Uuid> = changes.iter().map(|change| change.event_id).collect();
    let events = store::lock_events(&mut tx, &ids, Lock::Share).await?;
    let (mut addressed, mut done, mut postponed): (Vec<Addressed>, Vec<Uuid>, Vec<Uuid>) = Default::default();
    for (one, change) in waiting.iter().zip(&changes) {
        let event = events.get(&change.event_id);
        let known = registration_event(one.message_id, &one.topic, change, event)?;
        let unexplained = || about_registration(one.message_id, &one.topic, change, event);
        match known.map_or_else(|| one.is_over.then(unexplained).transpose(), |known| Ok(Some(known)))? {
            Some((event, cause)) => {
                addressed.push(Addressed { event, users: vec![change.user_id], cause });
                done.push(one.message_id);
            }
            None => postponed.push(one.message_id),
        }
    }
    store::delete_waiting(&mut tx, &done).await?;
    store::postpone(&mut tx, &postponed, WAIT_PAUSE).await?;
    record(&mut tx, policy, addressed).await?;
    tx.commit().await?;
    Ok(Round::Busy)
}

fn registration_of(payload: &str) -> Result<JoinChanged, EventError> {
    // The parser's error may quote a value.
    serde_json::from_str(payload).map_err(|_| EventError::NoRegistration)
}

/// The business event of a message about a registration; None if it has to wait for the message about its event.
fn registration_event(
    id: Uuid,
    topic: &str,
    change: &JoinChanged,
    event: Option<&JoinableEvent>,
) -> Result<Option<(BusinessEvent, Cause)>, EventError> {
    let Some(event) = event else { return Ok(None) };
    match event.fact(topic, change) {
        Fact::Registration => about_registration(id, topic, change, Some(event)).map(Some),
        Fact::Canceled { by } => {
            let payload = to_raw_value(&event.facts())?;
            let canceled = about(by, contracts::events::CANCELED, change.occurred_at, payload);
            Ok(Some((canceled, event.organizer())))
        }
        Fact::Unexplained => Ok(None),
    }
}

/// The business event that is the message itself. Its text names the event if that is known.
fn about_registration(
    id: Uuid,
    topic: &str,
    change: &JoinChanged,
    event: Option<&JoinableEvent>,
) -> Result<(BusinessEvent, Cause), EventError> {
    let (reason, expires_at) = (change.reason.as_deref(), change.expires_at);
    let payload = match event {
        Some(event) => to_raw_value(&EventFacts { reason, expires_at, ..event.facts() })?,
        None => to_raw_value(&UnknownEventFacts { event_id: change.event_id, reason, expires_at })?,
    };
    let cause = event.filter(|_| is_moderation(topic)).map_or(Cause::Direct, JoinableEvent::organizer);
    Ok((about(id, topic, change.occurred_at, payload), cause))
}

fn about(id: Uuid, event_type: &str, at: DateTime<Utc>, payload: Box<RawValue>) -> BusinessEvent {
    BusinessEvent { id, event_type: event_type.to_owned(), aggregate_type: None, aggregate_id: None, payload, at }
}

/// Saves changes of events. If one has another time or place, requests that all participants are notified.
pub(crate) async fn record_changes(
    tx: &mut Transaction<'static, Postgres>,
    policy: &Policy,
    messages: &[&Message],
) -> Result<(), EventError> {
    let parse = |message: &&Message| serde_json::from_str::<EventChanged>(message.payload.get());
    let changes: Vec<EventChanged> =
        messages.iter().map(parse).collect::<Result<_, _>>().map_err(|_| EventError::NoEvent)?;
    let ids: Vec<Uuid> = changes.iter().map(|change| change.event_id).collect();
    let mut events = store::lock_events(tx, &ids, Lock::Update).await?;
    let since = store::facts_since(tx).await?;
    let mut moved: Vec<(Uuid, Uuid, Previous)> = Vec::new();
    let mut changed: HashMap<Uuid, JoinableEvent> = HashMap::new();
    for (message, change) in messages.iter().zip(&changes) {
        let known = events.get(&change.event_id);
        let Some(new) = JoinableEvent::after(known, change, message.message_id) else { continue };
        if let Some(known) = known.filter(|known| new.moves(known) && change.occurred_at >= since) {
            moved.push((message.message_id, new.event_id, known.location_and_time()));
        }
        events.insert(new.event_id, new.clone());
        changed.insert(new.event_id, new);
    }
    store::save_events(tx, &changed.values().collect::<Vec<_>>()).await?;
    for (message, event_id, previous) in &moved {
        announcements::request_change(tx, *message, *event_id, previous, policy.change_delay, policy.change_pause)
            .await?;
    }
    let is_canceled = |event: &&JoinableEvent| event.status == EventStatus::Canceled;
    let canceled: Vec<Uuid> = changed.values().filter(is_canceled).map(|event| event.event_id).collect();
    if !canceled.is_empty() {
        announcements::drop_changes(tx, &canceled).await?;
    }
    store::end_wait(tx, &changed.into_keys().collect::<Vec<_>>()).await?;
    Ok(())
}
