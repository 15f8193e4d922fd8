//! Listeners: a business event becomes one notification for each recipient and wanted channel.

use std::collections::{BTreeMap, HashMap, HashSet};

use chrono::{DateTime, Utc};
use pillarbox::database::time;
use pillarbox::log::{AggregateId, Message};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::domain::business_event::{Audience, BusinessEvent, NewNotification, assign_seq};
use crate::domain::delivery_rules::{Channel, Rules};
use crate::domain::policy::{Cause, Causes, Policy};
use crate::error::EventError;
use crate::store::{announcements, expansion as store, preferences};

/// An event with more recipients is announced in steps.
const RECIPIENTS_MAX: usize = 1_000;
/// The recipients of all events of one transaction. An announcement is a transaction for each event, which is slow for events with
/// few recipients: a full batch of those must be below this limit.
const BATCH_RECIPIENTS_MAX: usize = 20_000;

/// An event, and who is notified of it.
pub(crate) struct Addressed {
    pub(crate) event: BusinessEvent,
    pub(crate) users: Vec<Uuid>,
    pub(crate) cause: Cause,
}

/// Records the notifications about business events of one aggregate type.
pub(crate) async fn expand(
    tx: &mut Transaction<'static, Postgres>,
    aggregate_type: &str,
    policy: &Policy,
    messages: &[&Message],
) -> Result<(), EventError> {
    let events = messages.iter().map(|message| parse(message)).collect::<Result<Vec<_>, EventError>>()?;
    let aggregates: Vec<i64> =
        events.iter().filter_map(|event| event.aggregate_id).collect::<HashSet<_>>().into_iter().collect();
    let recipients = store::recipients(tx, aggregate_type, &aggregates, RECIPIENTS_MAX + 1).await?;
    let announced = announcements::announced_aggregates(tx, aggregate_type, &aggregates).await?;
    let addressed = events.into_iter().map(|event| {
        let of_aggregate = event.aggregate_id.and_then(|id| recipients.of_aggregate.get(&id));
        let users = of_aggregate.into_iter().flatten().chain(&recipients.of_all).copied().collect();
        Addressed { event, users, cause: Cause::Direct }
    });
    let (direct, in_steps) = bounded(addressed, announced, BATCH_RECIPIENTS_MAX);
    record(tx, policy, direct).await?;
    if !in_steps.is_empty() {
        let in_steps: Vec<&BusinessEvent> = in_steps.iter().collect();
        store::insert_events(tx, &in_steps).await?;
        announcements::to_recipients(tx, aggregate_type, &in_steps).await?;
    }
    Ok(())
}

/// Divides events into those whose recipients are notified in this transaction, and those that are announced in steps: events
/// with very many recipients, events beyond the limit of the transaction, and every later event of such an aggregate, because its recipients hear
/// of events in their order. `announced`: the aggregates with announcements already.
fn bounded(
    addressed: impl Iterator<Item = Addressed>,
    mut announced: HashSet<i64>,
    recipients_max: usize,
) -> (Vec<Addressed>, Vec<BusinessEvent>) {
    let (mut direct, mut in_steps, mut total) = (Vec::new(), Vec::new(), 0);
    for Addressed { event, users, cause } in addressed {
        let aggregate_id = event.aggregate_id.unwrap_or_default();
        let is_large = users.len() > RECIPIENTS_MAX || total + users.len() > recipients_max;
        if is_large || announced.contains(&aggregate_id) {
            announced.insert(aggregate_id);
            in_steps.push(event);
        } else {
            total += users.len();
            direct.push(Addressed { event, users, cause });
        }
    }
    (direct, in_steps)
}

/// Records the notifications about events to these users, each once. A notification that exists stays as it is
/// and gets no second number in the inbox. E-mails beyond the limits of their organizers are recorded as skipped.
pub(crate) async fn record(
    tx: &mut Transaction<'static, Postgres>,
    policy: &Policy,
    addressed: Vec<Addressed>,
) -> Result<(), EventError> {
    let (mut notifications, now) = planned(tx, &policy.default_rules, &addressed).await?;
    let with_notifications: HashSet<Uuid> = notifications.iter().map(|one| one.event_id).collect();
    let mut events: Vec<&BusinessEvent> = addressed.iter().map(|one| &one.event).collect();
    events.retain(|event| with_notifications.contains(&event.id));
    events.sort_by_key(|event| event.id);
    events.dedup_by_key(|event| event.id);
    if events.is_empty() {
        return Ok(());
    }
    let new_events = store::insert_events(tx, &events).await?;
    // The notifications of an event are recorded together with the event, or after it: a new event has none.
    let are_new = new_events.len() == events.len();
    if !are_new {
        drop_existing(tx, &mut notifications, &new_events).await?;
    }
    let added = inboxes(&notifications, 1);
    let last = if added.is_empty() { HashMap::new() } else { store::add_to_inboxes(tx, &added).await? };
    // After the inboxes, whose locks `drop_existing` takes first.
    limit_emails(tx, policy, &mut notifications, &addressed, now).await?;
    assign_seq(&mut notifications, &last);
    let senders = addressed.iter().filter_map(|one| Some((one.event.id, one.cause.sender()?))).collect();
    Ok(store::insert_notifications(tx, &notifications, &senders, are_new, now).await?)
}

/// Counts the e-mails that organizers cause, and skips those beyond the limits.
async fn limit_emails(
    tx: &mut Transaction<'static, Postgres>,
    policy: &Policy,
    notifications: &mut [NewNotification],
    addressed: &[Addressed],
    now: DateTime<Utc>,
) -> Result<(), EventError> {
    let cause = |one| {
        let Addressed { event, cause, .. }: &Addressed = one;
        (event.id, (event.event_type.as_str(), cause))
    };
    let causes: Causes<'_> = addressed.iter().map(cause).collect();
    let demands = policy.email_limits.demands(notifications, &causes);
    if demands.is_empty() {
        return Ok(());
    }
    let totals = store::count_emails(tx, now, &demands).await?;
    let corrections = policy.email_limits.skip_excess(notifications, &causes, &demands, totals);
    if !corrections.is_empty() {
        store::count_emails(tx, now, &corrections).await?;
    }
    let skipped = notifications.iter().filter(|one| one.skipped.is_some()).count();
    let channel = <&str>::from(Channel::Email);
    metrics::counter!("pillarbox_notifications_skipped_total", "channel" => channel).increment(skipped as u64);
    Ok(())
}

/// Decides about the notifications of a batch, in its order. A user who is addressed twice gets one notification.
async fn planned(
    tx: &mut Transaction<'static, Postgres>,
    default_rules: &Rules,
    addressed: &[Addressed],
) -> Result<(Vec<NewNotification>, DateTime<Utc>), EventError> {
    let users: HashSet<Uuid> = addressed.iter().flat_map(|one| &one.users).copied().collect();
    if users.is_empty() {
        return Ok((Vec::new(), DateTime::UNIX_EPOCH));
    }
    let users = preferences::load_users(tx, &users.into_iter().collect::<Vec<_>>()).await?;
    let event_types: HashSet<String> = addressed.iter().map(|one| one.event.event_type.clone()).collect();
    let rules = preferences::rules_of(tx, &event_types.into_iter().collect::<Vec<_>>(), default_rules).await?;
    let audience =
        Audience { default_rules: default_rules.clone(), rules, user_settings: users.settings, deleted: users.deleted };
    let now = time::now(tx).await?;
    let (mut seen, mut planned) = (HashSet::new(), Vec::new());
    for Addressed { event, users, .. } in addressed {
        let new: Vec<Uuid> = users.iter().copied().filter(|user| seen.insert((event.id, *user))).collect();
        planned.extend(audience.expand(event, new, now));
    }
    Ok((planned, now))
}

/// Drops the in-app notifications that exist. The inboxes of the whole batch are locked first: a transaction that adds a notification
/// holds the lock of its inbox, so none appears after the check.
async fn drop_existing(
    tx: &mut Transaction<'static, Postgres>,
    notifications: &mut Vec<NewNotification>,
    new_events: &HashSet<Uuid>,
) -> Result<(), EventError> {
    store::add_to_inboxes(tx, &inboxes(notifications, 0)).await?;
    let is_repeated = |one: &&NewNotification| one.channel == Channel::InApp && !new_events.contains(&one.event_id);
    let (events, users): (Vec<Uuid>, Vec<Uuid>) =
        notifications.iter().filter(is_repeated).map(|one| (one.event_id, one.user_id)).unzip();
    let existing = store::existing_in_app(tx, &events, &users).await?;
    notifications.retain(|one| one.channel != Channel::InApp || !existing.contains(&(one.event_id, one.user_id)));
    Ok(())
}

/// The users with in-app notifications, in the order of their ids, and how many they get, times `factor`.
fn inboxes(notifications: &[NewNotification], factor: i32) -> Vec<(Uuid, i32)> {
    let mut added: BTreeMap<Uuid, i32> = BTreeMap::new();
    for one in notifications.iter().filter(|one| one.channel == Channel::InApp) {
        *added.entry(one.user_id).or_default() += factor;
    }
    added.into_iter().collect()
}

fn parse(message: &Message) -> Result<BusinessEvent, EventError> {
    let Some(AggregateId::Number(aggregate_id)) = message.aggregate_id else { return Err(EventError::NoAggregate) };
    Ok(BusinessEvent {
        id: message.original_id(),
        event_type: message.topic.clone(),
        aggregate_type: message.aggregate_type.clone(),
        aggregate_id: Some(aggregate_id),
        payload: message.payload.clone(),
        at: message.at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_bounded_by_recipients_and_the_events_of_an_aggregate_stay_in_order() {
        let event = |id: u128, aggregate: i64| BusinessEvent {
            id: Uuid::from_u128(id),
            event_type: "A".to_owned(),
            aggregate_type: Some("AGENCY".to_owned()),
            aggregate_id: Some(aggregate),
            payload: serde_json::value::RawValue::NULL.to_owned(),
            at: DateTime::UNIX_EPOCH,
        };
        let users = |count: usize| vec![Uuid::nil(); count];
        let addressed = |event, count| Addressed { event, users: users(count), cause: Cause::Direct };
        let batch = [
            addressed(event(1, 1), 3),
            addressed(event(2, 2), RECIPIENTS_MAX + 1),
            addressed(event(3, 2), 1),
            addressed(event(4, 1), RECIPIENTS_MAX),
            addressed(event(5, 3), 1),
        ];
        let many = (6..).take(10).map(|id| addressed(event(id, id as i64), RECIPIENTS_MAX));
        let (direct, in_steps) = bounded(batch.into_iter().chain(many), HashSet::from([3]), 5_000);
        let ids = |events: Vec<Uuid>| events.iter().map(Uuid::as_u128).collect::<Vec<_>>();
        assert_eq!(ids(direct.iter().map(|one| one.event.id).collect()), [1, 4, 6, 7, 8]);
        assert_eq!(ids(in_steps.iter().map(|event| event.id).collect()), [2, 3, 5, 9, 10, 11, 12, 13, 14, 15]);
    }

    #[test]
    fn inboxes_are_locked_in_the_order_of_their_users() {
        let one = |user: u128, channel| NewNotification {
            event_id: Uuid::nil(),
            user_id: Uuid::from_u128(user),
            channel,
            due_at: None,
            seq: None,
            skipped: None,
        };
        let batch = [one(9, Channel::InApp), one(2, Channel::InApp), one(1, Channel::Email), one(9, Channel::InApp)];
        let expected: HashMap<Uuid, i32> = HashMap::from([(Uuid::from_u128(2), 1), (Uuid::from_u128(9), 2)]);
        let locked = inboxes(&batch, 1);
        assert!(locked.is_sorted_by_key(|(user, _)| *user));
        assert_eq!(HashMap::from_iter(locked), expected);
    }
}
