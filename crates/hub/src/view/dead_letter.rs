use chrono::{DateTime, Utc};
use contracts::EventId;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::Reason;
use crate::store::dead_letter::{DeadLetter, Snapshots};
use crate::view::MessageId;

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
