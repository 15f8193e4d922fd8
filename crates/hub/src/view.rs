//! The hub's things as people see them. No secret is among them, but in the one answer that is there to show it.

use std::collections::BTreeMap;
use std::fmt;

use chrono::{DateTime, Utc};
use contracts::EventId;
use mailbox::log::Message as Logged;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::{EventTypes, Filter, Format, OnExhausted, Outcome, Reason, Subscriber};
use crate::fields::{HIDDEN, SignatureKind};
use crate::signature::{SecretKind, SigningSecret};
use crate::store::dead_letter::{DeadLetter, Snapshots};
use crate::store::message::{Attempt, Message, Progress, Unsent};
use crate::store::subscriber::Known;

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Subscriber)]
pub(crate) struct SubscriberView {
    id: Uuid,
    name: String,
    url: String,
    event_types: Vec<EventTypes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    filter: Option<Filter>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    retry_backoff_seconds: Vec<u32>,
    retry_statuses: Vec<u16>,
    on_exhausted: OnExhausted,
    timeout_ms: u32,
    max_in_flight: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_limit_per_second: Option<u32>,
    /// Their names; the values are not shown.
    #[schema(example = json!({"authorization": "***"}))]
    headers: BTreeMap<String, &'static str>,
    format: Format,
    is_active: bool,
    /// Why it was switched off, if it was not you who did that.
    #[serde(skip_serializing_if = "Option::is_none")]
    inactive_reason: Option<String>,
    /// Since when its messages wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused_at: Option<DateTime<Utc>>,
    /// Its `ETag`, too.
    version: i64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

/// What deliveries are signed with, but for the secret itself.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SecretView {
    signature: SignatureKind,
    /// What a receiver verifies `v1a` with.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "whpk_...")]
    public_key: Option<String>,
    /// Nothing is signed with it from then on.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SubscriberWithSecrets {
    #[serde(flatten)]
    subscriber: SubscriberView,
    /// The newest first.
    secrets: Vec<SecretView>,
}

/// The only answer that shows a secret.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SubscriberWithSecret {
    #[serde(flatten)]
    subscriber: SubscriberWithSecrets,
    /// What deliveries are signed with from now on. It is not shown again.
    #[schema(example = "whsec_...")]
    secret: String,
}

impl From<&Subscriber> for SubscriberView {
    fn from(subscriber: &Subscriber) -> SubscriberView {
        let settings = subscriber.settings.clone();
        SubscriberView {
            id: subscriber.id,
            name: settings.name,
            url: settings.url,
            event_types: settings.event_types,
            filter: settings.filter,
            ordering_key: settings.ordering_key,
            retry_backoff_seconds: settings.retry_backoff_seconds,
            retry_statuses: settings.retry_statuses,
            on_exhausted: settings.on_exhausted,
            timeout_ms: settings.timeout_ms,
            max_in_flight: settings.max_in_flight,
            rate_limit_per_second: settings.rate_limit_per_second,
            headers: settings.headers.into_iter().map(|(name, _)| (name, HIDDEN)).collect(),
            format: settings.format,
            is_active: settings.is_active,
            inactive_reason: subscriber.inactive_reason.clone(),
            paused_at: subscriber.paused_at,
            version: subscriber.version,
            created_at: subscriber.created_at,
            updated_at: subscriber.updated_at,
        }
    }
}

impl From<&Known> for SubscriberWithSecrets {
    fn from(known: &Known) -> SubscriberWithSecrets {
        let view = |(secret, expires_at): &(SigningSecret, Option<DateTime<Utc>>)| SecretView {
            signature: match secret.kind() {
                SecretKind::Symmetric => SignatureKind::V1,
                SecretKind::Ed25519 => SignatureKind::V1a,
            },
            public_key: secret.public(),
            expires_at: *expires_at,
        };
        SubscriberWithSecrets {
            subscriber: SubscriberView::from(&known.subscriber),
            secrets: known.secrets.iter().map(view).collect(),
        }
    }
}

impl SubscriberWithSecret {
    pub(crate) fn revealing(known: &Known, secret: &SigningSecret) -> SubscriberWithSecret {
        SubscriberWithSecret { subscriber: known.into(), secret: secret.to_text() }
    }
}

/// What came of a test.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TestResult {
    #[schema(value_type = String)]
    pub(crate) event_id: EventId,
    /// Whether a delivery would be one.
    pub(crate) delivered: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    pub(crate) latency_ms: u64,
    /// How the answer begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) excerpt: Option<String>,
    /// What kind of failure: `status`, or why there was no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
}

/// Lists leave out the payload.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubEvent)]
pub(crate) struct EventView {
    #[schema(value_type = String, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: EventId,
    #[schema(example = "order.paid")]
    event_type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    received_at: DateTime<Utc>,
    /// As it was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

impl EventView {
    pub(crate) fn brief(logged: Logged) -> EventView {
        EventView { payload: None, ..EventView::whole(logged) }
    }

    pub(crate) fn whole(logged: Logged) -> EventView {
        EventView {
            event_id: EventId(logged.message_id),
            event_type: logged.topic,
            ordering_key: logged.key,
            received_at: logged.at,
            payload: Some(logged.payload),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubEventWithOutcomes)]
pub(crate) struct EventWithOutcomes {
    #[serde(flatten)]
    pub(crate) event: EventView,
    /// One for each subscriber that asked for its type.
    pub(crate) outcomes: Vec<OutcomeView>,
}

/// What became of an event for one subscriber.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubOutcome)]
pub(crate) struct OutcomeView {
    pub(crate) subscriber_id: Uuid,
    name: String,
    /// Absent if there was nothing to send.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    message_id: Option<MessageId>,
    #[serde(flatten)]
    progress: ProgressView,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProgressView {
    outcome: Outcome,
    attempts: i16,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_attempt_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_status: Option<i16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_attempt_at: Option<DateTime<Utc>>,
    /// It died, and those behind it wait until it is retried or given up.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    blocks_lane: bool,
}

impl From<Progress> for ProgressView {
    fn from(progress: Progress) -> ProgressView {
        let Progress { outcome, attempts, last_attempt_at, last_status, last_error, next_attempt_at, blocks_lane } =
            progress;
        ProgressView { outcome, attempts, last_attempt_at, last_status, last_error, next_attempt_at, blocks_lane }
    }
}

impl OutcomeView {
    pub(crate) fn sent(event: Uuid, message: Message) -> OutcomeView {
        OutcomeView {
            subscriber_id: message.subscriber,
            name: message.name,
            message_id: Some(MessageId { event, subscriber: message.subscriber }),
            progress: message.progress.into(),
        }
    }
}

impl From<Unsent> for OutcomeView {
    fn from(unsent: Unsent) -> OutcomeView {
        let progress = ProgressView {
            outcome: unsent.outcome,
            attempts: 0,
            last_attempt_at: None,
            last_status: None,
            last_error: None,
            next_attempt_at: None,
            blocks_lane: false,
        };
        OutcomeView { subscriber_id: unsent.subscriber, name: unsent.name, message_id: None, progress }
    }
}

/// An event on its way to a subscriber: `<event>.<subscriber>`, two UUIDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct MessageId {
    pub(crate) event: Uuid,
    pub(crate) subscriber: Uuid,
}

impl TryFrom<String> for MessageId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<MessageId, &'static str> {
        let parts = || {
            let (event, subscriber) = text.split_once('.')?;
            Some(MessageId { event: EventName::read(event)?, subscriber: subscriber.parse().ok()? })
        };
        parts().ok_or("takes the UUID of an event and that of a subscriber, joined by a dot")
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.event, self.subscriber)
    }
}

impl Serialize for MessageId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// An event's id as people have it at hand: `evt_` and a UUID, or the UUID alone.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct EventName(pub(crate) Uuid);

impl EventName {
    fn read(text: &str) -> Option<Uuid> {
        text.strip_prefix("evt_").unwrap_or(text).parse().ok()
    }
}

impl TryFrom<String> for EventName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<EventName, &'static str> {
        EventName::read(&text).map(EventName).ok_or("takes evt_ and a UUID, or the UUID alone")
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubMessage)]
pub(crate) struct MessageView {
    /// Absent if its event is not kept any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    id: Option<MessageId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    event_id: Option<EventId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_type: Option<String>,
    subscriber_id: Uuid,
    /// Messages of one lane are sent one after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<String>,
    /// The place in its lane.
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<i64>,
    created_at: DateTime<Utc>,
    /// The dead letter that it was made of, on request.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_of: Option<Uuid>,
    #[serde(flatten)]
    progress: ProgressView,
}

impl MessageView {
    /// `event`: its id and its type.
    pub(crate) fn new(message: Message, event: Option<(Uuid, String)>) -> MessageView {
        let (event_id, event_type) = event.unzip();
        MessageView {
            id: event_id.map(|event| MessageId { event, subscriber: message.subscriber }),
            event_id: event_id.map(EventId),
            event_type,
            subscriber_id: message.subscriber,
            lane: message.lane,
            seq: message.seq,
            created_at: message.at,
            retry_of: message.retry_of,
            progress: message.progress.into(),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubAttempt)]
pub(crate) struct AttemptView {
    at: DateTime<Utc>,
    /// From 1 again for each time that it was retried as a dead letter.
    attempt: i16,
    outcome: Outcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<i16>,
    latency_ms: i32,
    /// What kind of failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
    /// How the answer begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    excerpt: Option<String>,
}

impl From<Attempt> for AttemptView {
    fn from(attempt: Attempt) -> AttemptView {
        let Attempt { at, attempt, outcome, status, latency_ms, error, detail, excerpt } = attempt;
        AttemptView { at, attempt, outcome, status, latency_ms, error, detail, excerpt }
    }
}

/// Lists leave out the snapshots.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubDeadLetter)]
pub(crate) struct DeadLetterView {
    id: Uuid,
    /// Absent, as is all of its event, if that was not kept any more when it died.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    message_id: Option<MessageId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    event_id: Option<EventId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_type: Option<String>,
    subscriber_id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<String>,
    reason: Reason,
    detail: String,
    attempts: i16,
    moved_to_dlq_at: DateTime<Utc>,
    /// Who had it sent again.
    #[serde(skip_serializing_if = "Option::is_none")]
    manual_retry_by: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    manual_retry_at: Option<DateTime<Utc>>,
    /// As it was when it died.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    event: Option<Box<RawValue>>,
    /// As it was when the message died.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    subscriber: Option<Box<RawValue>>,
}

impl DeadLetterView {
    pub(crate) fn brief(dead: DeadLetter) -> DeadLetterView {
        let (manual_retry_by, manual_retry_at) = dead.retried.unzip();
        let (event, event_type) = dead.event.unzip();
        DeadLetterView {
            id: dead.id,
            message_id: event.map(|event| MessageId { event, subscriber: dead.subscriber }),
            event_id: event.map(EventId),
            event_type,
            subscriber_id: dead.subscriber,
            lane: dead.lane,
            reason: dead.reason,
            detail: dead.detail,
            attempts: dead.attempts,
            moved_to_dlq_at: dead.moved_to_dlq_at,
            manual_retry_by,
            manual_retry_at,
            event: None,
            subscriber: None,
        }
    }

    pub(crate) fn whole(dead: DeadLetter, snapshots: Snapshots) -> DeadLetterView {
        let Snapshots { event, subscriber } = snapshots;
        DeadLetterView { event, subscriber: Some(subscriber), ..DeadLetterView::brief(dead) }
    }
}
