//! Messages and their attempts in API responses, and the ids by which callers name them.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::deliveries::domain::Outcome;
use crate::deliveries::message::public_lane;
use crate::events::store::{Attempt, Message};
use crate::events::view::{EventReference, ProgressView};

/// The id of a message: the UUIDs of its event and its subscriber, joined by a dot.
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
            Some(MessageId { event: EventIdParam::parse(event)?, subscriber: subscriber.parse().ok()? })
        };
        parts().ok_or("must be the UUID of an event and the UUID of a subscriber, joined by a dot")
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

/// The id of an event in a path: `evt_` and a UUID, or the UUID alone.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct EventIdParam(pub(crate) Uuid);

impl EventIdParam {
    fn parse(text: &str) -> Option<Uuid> {
        text.strip_prefix("evt_").unwrap_or(text).parse().ok()
    }
}

impl TryFrom<String> for EventIdParam {
    type Error = &'static str;

    fn try_from(text: String) -> Result<EventIdParam, &'static str> {
        EventIdParam::parse(&text).map(EventIdParam).ok_or("must be `evt_` and a UUID, or the UUID alone")
    }
}

/// Why a message is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = HubMessageKind)]
pub(crate) enum MessageKind {
    /// The event was posted.
    Original,
    /// A dead letter was retried.
    Retry,
    /// A replay sends the event again, or a backfill sends it to a new subscriber.
    Replay,
}

impl MessageKind {
    /// A retry of a message of a replay is a retry.
    fn of(retry_of: Option<Uuid>, replay: Option<Uuid>) -> MessageKind {
        match (retry_of, replay) {
            (Some(_), _) => MessageKind::Retry,
            (None, Some(_)) => MessageKind::Replay,
            (None, None) => MessageKind::Original,
        }
    }
}

/// An event for one subscriber. If it was sent several times, because it was retried as a dead letter or by a replay, the state
/// is that of the last time.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubMessage)]
pub(crate) struct MessageView {
    /// Absent if the retention of the event has expired.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    id: Option<MessageId>,
    #[serde(flatten)]
    event: EventReference,
    subscriber_id: Uuid,
    subscriber_name: String,
    /// Messages of one lane are sent one after the other. Absent: the message waits for no other.
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<String>,
    /// The sequence number of the message in its lane.
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<i64>,
    /// When the event became a message for this subscriber, was last sent again on request, or was last moved by maintenance.
    created_at: DateTime<Utc>,
    /// Why the message is sent.
    kind: MessageKind,
    /// The dead letter that was retried last.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_of: Option<Uuid>,
    /// The replay by which the message was sent again last.
    #[serde(skip_serializing_if = "Option::is_none")]
    replay_id: Option<Uuid>,
    #[serde(flatten)]
    progress: ProgressView,
}

impl MessageView {
    /// `name` is the event's id, type and ordering key.
    pub(crate) fn new(message: Message, name: Option<(Uuid, String, Option<String>)>) -> MessageView {
        let event_id = name.as_ref().map(|(event, ..)| *event);
        let (event, ordering_key) = match name {
            Some((id, event_type, ordering_key)) => (Some((id, event_type)), ordering_key),
            None => (None, None),
        };
        MessageView {
            id: event_id.map(|event| MessageId { event, subscriber: message.subscriber }),
            event: EventReference::new(event, ordering_key, message.log_ref.at),
            subscriber_id: message.subscriber,
            subscriber_name: message.name,
            lane: message.lane.map(|lane| public_lane(&lane, message.replay).to_owned()),
            seq: message.seq,
            created_at: message.at,
            kind: MessageKind::of(message.retry_of, message.replay),
            retry_of: message.retry_of,
            replay_id: message.replay,
            progress: message.progress.into(),
        }
    }
}

/// One HTTP request for a message.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubAttempt)]
pub(crate) struct AttemptView {
    at: DateTime<Utc>,
    /// The number of the attempt, from 1. The attempts of a retried dead letter are numbered after the earlier ones; a replay
    /// starts at 1 again.
    attempt: i16,
    /// Why the message was sent.
    kind: MessageKind,
    /// The dead letter that was retried.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_of: Option<Uuid>,
    /// The replay that has sent the message again.
    #[serde(skip_serializing_if = "Option::is_none")]
    replay_id: Option<Uuid>,
    outcome: Outcome,
    /// The HTTP status. Absent: there was no response.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<i16>,
    latency_ms: i32,
    /// The kind of failure: `status`, or why there was no response.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The failure in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
    /// The beginning of the response body.
    #[serde(skip_serializing_if = "Option::is_none")]
    excerpt: Option<String>,
}

impl From<Attempt> for AttemptView {
    fn from(attempt: Attempt) -> AttemptView {
        AttemptView {
            at: attempt.at,
            attempt: attempt.attempt,
            kind: MessageKind::of(attempt.retry_of, attempt.replay),
            retry_of: attempt.retry_of,
            replay_id: attempt.replay,
            outcome: attempt.outcome,
            status: attempt.status,
            latency_ms: attempt.latency_ms,
            error: attempt.error,
            detail: attempt.detail,
            excerpt: attempt.excerpt,
        }
    }
}
