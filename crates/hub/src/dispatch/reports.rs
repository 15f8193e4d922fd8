//! System events about what the dispatcher saves: dead letters, and subscribers that are switched off or recover.
//!
//! A report commits in the transaction that saves the fact. Reports cannot cause each other without end: one about a subscriber
//! is never sent to that subscriber ([`crate::deliveries::system_event::is_about`]), and nothing is reported about the messages of reports. The dead letters of
//! a subscriber that one transaction saves are reported together, so that many of them are few events.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use pillarbox::log::{Post, PostError};
use serde::Serialize;
use serde_json::json;
use serde_json::value::to_raw_value;
use uuid::Uuid;

use super::changes::{Changes, NewDeadLetter};
use crate::deliveries::domain::Reason;
use crate::deliveries::recipient::Recipient;
use crate::deliveries::system_event::{SUBSCRIBER_RECOVERED, is_system_source};
use crate::dispatch::store::writes::DisabledSubscriber;

/// Dead letters that one event reports at most.
const DEAD_LETTERS_MAX: usize = 100;

const SUBSCRIBER_DISABLED: &str = "hub.subscriber.disabled";
const MESSAGE_DEAD: &str = "hub.message.dead";

/// A dead letter in a report.
#[derive(Serialize)]
struct DeadMessage<'a> {
    event_id: String,
    event_type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<&'a str>,
    reason: Reason,
    detail: &'a str,
    attempts: u16,
    at: DateTime<Utc>,
}

/// The events about what a transaction of the dispatcher saves; `disabled` are the subscribers that it has switched off.
pub(crate) fn reports(changes: &Changes, disabled: &[DisabledSubscriber], now: DateTime<Utc>) -> Vec<Post> {
    let mut posts = Vec::new();
    let mut by_subscriber: BTreeMap<Uuid, Vec<&NewDeadLetter>> = BTreeMap::new();
    for dead in &changes.dead_letters {
        // Neither for a message whose content has expired: it may have been that of a report.
        if dead.message.event.as_ref().is_some_and(|event| !is_system_source(&event.source)) {
            by_subscriber.entry(dead.recipient.id).or_default().push(dead);
        }
    }
    for (id, dead) in by_subscriber {
        posts.extend(dead.chunks(DEAD_LETTERS_MAX).filter_map(|dead| dead_letters(id, dead)));
    }
    for DisabledSubscriber { id, tenant, name, reason } in disabled {
        let payload = json!({
            "subscriber_id": id, "subscriber_name": name, "reason": Reason::Gone, "detail": reason, "disabled_at": now,
        });
        posts.extend(post(SUBSCRIBER_DISABLED, tenant, *id, &payload));
    }
    for recovery in &changes.recoveries {
        let Recipient { id, tenant, .. } = &*recovery.recipient;
        let payload = json!({
            "subscriber_id": id, "subscriber_name": name_of(&recovery.recipient), "cause": "delivered",
            "failing_since": recovery.failing_since, "recovered_at": recovery.at,
        });
        posts.extend(post(SUBSCRIBER_RECOVERED, tenant, *id, &payload));
    }
    posts
}

fn dead_letters(id: Uuid, dead: &[&NewDeadLetter]) -> Option<Post> {
    let recipient = &dead.first()?.recipient;
    let messages: Vec<DeadMessage<'_>> = dead.iter().filter_map(|dead| dead_message(dead)).collect();
    let payload = json!({"subscriber_id": id, "subscriber_name": name_of(recipient), "messages": messages});
    post(MESSAGE_DEAD, &recipient.tenant, id, &payload)
}

fn dead_message(dead: &NewDeadLetter) -> Option<DeadMessage<'_>> {
    let event = dead.message.event.as_ref()?;
    Some(DeadMessage {
        event_id: contracts::EventId(event.id).to_string(),
        event_type: &event.topic,
        ordering_key: event.key.as_deref(),
        reason: dead.reason,
        detail: &dead.detail,
        attempts: dead.attempts,
        at: dead.at,
    })
}

fn name_of(recipient: &Arc<Recipient>) -> &str {
    recipient.snapshot["name"].as_str().unwrap_or_default()
}

/// None if the tenant has no valid name, which no stored subscriber has.
fn post(event_type: &str, tenant: &str, subscriber: Uuid, payload: &serde_json::Value) -> Option<Post> {
    let mut post = Post::new(event_type, to_raw_value(payload).ok()?);
    (post.tenant, post.key) = (tenant.parse::<Tenant>().ok()?, Some(subscriber.to_string()));
    Some(post)
}

/// The error of a report that could not be posted. Reports are valid, so it is one of the database.
pub(crate) fn database_error(error: PostError) -> sqlx::Error {
    match error {
        PostError::Database(error) => error,
        invalid @ (PostError::Topic
        | PostError::Key
        | PostError::Aggregate
        | PostError::TooLarge(_)
        | PostError::TooDeep) => sqlx::Error::Encode(invalid.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deliveries::message::fixtures::event;
    use crate::deliveries::message::{HubEvent, HubMessage};
    use crate::deliveries::recipient::fixtures::recipient;

    fn dead(recipient: &Arc<Recipient>, source: &'static str) -> NewDeadLetter {
        let event = HubEvent { source: source.into(), ..event(1) };
        let message =
            HubMessage { n: 1, lane: None, seq: None, attempts_before: 0, replay: None, event: Some(Arc::new(event)) };
        let (detail, at) = ("x".repeat(300), DateTime::UNIX_EPOCH);
        NewDeadLetter { recipient: recipient.clone(), message, reason: Reason::Exhausted, detail, attempts: 4, at }
    }

    #[test]
    fn a_storm_of_dead_letters_is_few_reports_and_those_of_reports_are_none() {
        let (one, two) = (Arc::new(recipient()), Arc::new(recipient()));
        let mut changes = Changes::default();
        changes.dead_letters.extend((0..100_000).map(|_| dead(&one, "hub")));
        changes.dead_letters.extend((0..1_000).map(|_| dead(&two, "hub.system")));
        changes.dead_letters.push(dead(&two, "sql"));
        let expired = dead(&two, "hub");
        changes.dead_letters.push(NewDeadLetter { message: HubMessage { event: None, ..expired.message }, ..expired });
        let posts = reports(&changes, &[], DateTime::UNIX_EPOCH);
        assert_eq!(posts.len(), 1_001);
        assert!(posts.iter().all(|post| post.check().is_ok()), "none is too large");
        assert_eq!(posts.iter().filter(|post| post.key == Some(two.id.to_string())).count(), 1);
    }
}
