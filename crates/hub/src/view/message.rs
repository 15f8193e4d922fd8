use std::fmt;

use chrono::{DateTime, Utc};
use contracts::EventId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::Outcome;
use crate::store::message::{Attempt, Message};
use crate::view::ProgressView;

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
