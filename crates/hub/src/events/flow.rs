//! Browsing events and the messages that fan-out made of them, and giving messages up.

pub(crate) mod rejected;

use std::collections::{HashMap, HashSet};

use http_kit::auth::Principal;
use pillarbox::log::Tenant;
use pillarbox::log::{LogRef, Message as Logged, post};
use pillarbox::operations::browse::{self, Selection};
use pillarbox::operations::status::statuses_of;
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::deliveries::command::{CONTROL_SOURCE, CommandRequest, DeadLetterRequest, command_post};
use crate::deliveries::domain::{EventOutcome, EventStatus, FanOutProgress, Outcome};
use crate::error::Error;
use crate::events::selection::is_event_source;
use crate::events::store;
use crate::events::store::{Attempt, EventFilter, Message, MessageScope};
use crate::events::view::message::{MessageId, MessageView};
use crate::events::view::{EventView, EventWithOutcomes, ListedEvent, OutcomeView, RejectionView};
use crate::{FAN_OUT, Hub, directory};

/// The status of a log message that a consumer has processed.
const PASSED: &str = "sent";

/// Returns the events of a bounded part of the log, newest first, and where the next part starts.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    filter: EventFilter,
    before: Option<i64>,
    limit: u32,
) -> Result<(Vec<ListedEvent>, Option<i64>), Error> {
    let selected =
        Selection { topic: filter.event_type, from: filter.from, to: filter.to, ..events_of_tenant(hub, tenant) };
    let mut db = hub.db.acquire().await?;
    let page = browse::page(&mut db, &selected, before, limit).await?;
    let log_refs: Vec<LogRef> = page.messages.iter().map(Logged::log_ref).collect();
    let outcomes = event_outcomes(&mut db, &log_refs).await?;
    let listed = |event: Logged| {
        let outcome = outcomes.get(&event.id).copied().unwrap_or(EventOutcome::Matched);
        ListedEvent { event: EventView::summary(event), outcome, rejection: None }
    };
    Ok((page.messages.into_iter().map(listed).collect(), page.before))
}

/// The outcome of each of these events, by its id in the log, except those that are matched.
async fn event_outcomes(db: &mut PgConnection, events: &[LogRef]) -> Result<HashMap<i64, EventOutcome>, Error> {
    let matched = store::matched(db, events).await?;
    let others: Vec<LogRef> = events.iter().copied().filter(|event| !matched.contains(&event.id)).collect();
    if others.is_empty() {
        return Ok(HashMap::new());
    }
    let fan_out = fan_out_progress(db, &others).await?;
    let ids: Vec<i64> = others.iter().map(|event| event.id).collect();
    let rejected = store::rejected::among(db, &ids).await?;
    // Again: fan-out may have passed an event in between.
    let matched = store::matched(db, &others).await?;
    let outcome = |event: &LogRef| {
        let progress = fan_out.get(&event.id).copied().unwrap_or(FanOutProgress::Waiting);
        if rejected.get(&event.id).is_some_and(Option::is_none) {
            return (event.id, EventOutcome::Rejected);
        }
        (event.id, EventOutcome::of(progress, matched.contains(&event.id)))
    };
    Ok(others.iter().map(outcome).collect())
}

/// Returns an event with its outcome for each subscriber whose types match it.
pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<EventWithOutcomes, Error> {
    let mut db = hub.db.acquire().await?;
    let event = find_candidate(&mut db, tenant, id).await?.ok_or(Error::NoEvent)?;
    let log_ref = event.log_ref();
    // Read before the messages: if fan-out has passed the event by now, its messages are found.
    let fan_out = fan_out_progress(&mut db, &[log_ref]).await?.remove(&log_ref.id).unwrap_or(FanOutProgress::Waiting);
    let messages = store::of_event(&mut db, tenant, log_ref, None).await?;
    let skipped = store::skipped(&mut db, tenant, log_ref).await?;
    // A message that was an event when it was fanned out remains one, whatever `hub.export` and `hub.sql_events` list now.
    // And one that was none when fan-out passed it did not become one.
    let is_selected =
        events_of_tenant(hub, tenant).matches(&event) && browse::was_selected(&mut db, FAN_OUT, &event).await?;
    let is_shown = !messages.is_empty() || !skipped.is_empty();
    if !is_shown && !is_selected {
        return Err(Error::NoEvent);
    }
    // Its subscribers may have been deleted since, or only a stream contains it.
    let is_matched = is_shown || !store::matched(&mut db, &[log_ref]).await?.is_empty();
    // A replay may have sent the event to a subscriber for which it was skipped at first.
    let reached: HashSet<Uuid> = messages.iter().map(|message| message.subscriber).collect();
    let mut outcomes: Vec<_> = messages.into_iter().map(|message| OutcomeView::of_message(id, message)).collect();
    outcomes.extend(skipped.into_iter().filter(|skip| !reached.contains(&skip.subscriber)).map(OutcomeView::from));
    outcomes.sort_by_key(|outcome| outcome.subscriber_id);
    // Fan-out does not wait for an event that it no longer selects: it has processed it before the settings were narrowed.
    let fan_out = match fan_out {
        FanOutProgress::Waiting if !is_selected => FanOutProgress::Done,
        fan_out => fan_out,
    };
    let rejection = store::rejected::find(&mut db, tenant, log_ref.id).await?.map(RejectionView::from);
    let (status, outcome) = match rejection {
        Some(_) => (EventStatus::Rejected, EventOutcome::Rejected),
        None => {
            (EventStatus::of(fan_out, outcomes.iter().map(OutcomeView::outcome)), EventOutcome::of(fan_out, is_matched))
        }
    };
    Ok(EventWithOutcomes { event: EventView::with_payload(event), status, outcome, rejection, outcomes })
}

/// Whether fan-out has processed each of the events, by its id in the log. An event that fan-out does not read is missing.
async fn fan_out_progress(db: &mut PgConnection, events: &[LogRef]) -> Result<HashMap<i64, FanOutProgress>, Error> {
    let statuses = statuses_of(&mut *db, events, FAN_OUT).await?;
    // Parked, dead and discarded events were not fanned out either; an operator decides about them.
    let is_passed = |id: &i64| statuses.get(id).is_some_and(|status| status == PASSED);
    let passed: Vec<i64> = statuses.keys().copied().filter(is_passed).collect();
    let deferred = store::deferred::among(db, &passed).await?;
    let progress = |id: &i64| {
        if !is_passed(id) {
            FanOutProgress::Waiting
        } else if deferred.contains(id) {
            FanOutProgress::Deferred
        } else {
            FanOutProgress::Done
        }
    };
    Ok(statuses.keys().map(|id| (*id, progress(id))).collect())
}

/// Returns the messages of a subscriber, or of all subscribers of the tenant, newest first, and where the next page starts.
pub(crate) async fn messages(
    hub: &Hub,
    tenant: &Tenant,
    subscriber: Option<Uuid>,
    outcome: Option<Outcome>,
    before: Option<i64>,
    limit: u32,
) -> Result<(Vec<MessageView>, Option<i64>), Error> {
    let mut db = hub.db.acquire().await?;
    let scope = match subscriber {
        Some(subscriber) if !directory::store::exists(&mut db, tenant, subscriber).await? => {
            return Err(Error::NoSubscriber);
        }
        Some(subscriber) => MessageScope::Subscriber(subscriber),
        None => MessageScope::Tenant(tenant),
    };
    let page = store::list(&mut db, scope, outcome, before, limit).await?;
    let log_refs: Vec<LogRef> = page.messages.iter().map(|message| message.log_ref).collect();
    let names = browse::load_names(&mut db, &log_refs).await?;
    let names: HashMap<i64, (Uuid, String, Option<String>)> =
        names.into_iter().map(|name| (name.log_ref.id, (name.message_id, name.topic, name.key))).collect();
    let view = |message: Message| {
        // Cloned: a retried event appears in several messages.
        let name = names.get(&message.log_ref.id).cloned();
        MessageView::new(message, name)
    };
    Ok((page.messages.into_iter().map(view).collect(), page.before))
}

/// Returns a message and its state.
pub(crate) async fn message(hub: &Hub, tenant: &Tenant, id: MessageId) -> Result<MessageView, Error> {
    let mut db = hub.db.acquire().await?;
    let (event, message) = find_message(&mut db, tenant, id).await?;
    Ok(MessageView::new(message, Some((event.message_id, event.topic, event.key))))
}

/// Returns the attempts of a message, oldest first.
pub(crate) async fn attempts(hub: &Hub, tenant: &Tenant, id: MessageId) -> Result<Vec<Attempt>, Error> {
    let mut db = hub.db.acquire().await?;
    let (event, _) = find_message(&mut db, tenant, id).await?;
    Ok(store::attempts(&mut db, id.subscriber, event.log_ref()).await?)
}

/// Commands the subscriber's dispatcher to give a message up. The dispatcher decides whether that is still possible.
/// Fails if the message is already delivered, or a dead letter that does not block its lane.
pub(crate) async fn give_up(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: MessageId,
    by: Principal,
) -> Result<(), Error> {
    let (_, message) = find_message(tx, tenant, id).await?;
    if message.progress.outcome.is_final() && !message.progress.blocks_lane {
        return Err(Error::AlreadyFinal(message.progress.outcome.as_str()));
    }
    let request = DeadLetterRequest { subscriber: id.subscriber, n: message.n, by: by.to_string() };
    let command = command_post(tenant, id.subscriber, &CommandRequest::DeadLetter(request))?;
    post(tx, &CONTROL_SOURCE, &command).await?;
    tracing::info!(message = %id, %by, "dead-lettering of a message requested");
    Ok(())
}

pub(crate) async fn find_message(
    db: &mut PgConnection,
    tenant: &Tenant,
    id: MessageId,
) -> Result<(Logged, Message), Error> {
    let event = find_candidate(db, tenant, id.event).await?.ok_or(Error::NoMessage)?;
    let message = store::of_event(db, tenant, event.log_ref(), Some(id.subscriber)).await?.pop();
    Ok((event, message.ok_or(Error::NoMessage)?))
}

/// Returns a log message that may be an event of this tenant, by its source. A message that was not posted to the hub is an
/// event only if `hub.export` or `hub.sql_events` lists its topic, or if it was fanned out; the caller checks that.
pub(crate) async fn find_candidate(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> Result<Option<Logged>, Error> {
    let is_candidate = |message: &Logged| message.tenant == tenant.as_str() && is_event_source(&message.source);
    Ok(browse::find(db, id).await?.filter(is_candidate))
}

/// Selects the events of a tenant from the log.
fn events_of_tenant(hub: &Hub, tenant: &Tenant) -> Selection {
    Selection {
        tenant: Some(tenant.as_str().to_owned()),
        filter: Some(hub.events.of_tenant(tenant).clone()),
        consumer: Some(FAN_OUT.to_owned()),
        ..Selection::default()
    }
}
