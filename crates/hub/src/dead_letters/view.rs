//! Dead letters in API responses.

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::dead_letters::store::{DeadLetter, DeadLetterWithSnapshots};
use crate::deliveries::domain::Reason;
use crate::deliveries::message::public_lane;
use crate::events::view::message::MessageId;
use crate::events::view::{EventReference, EventView};

/// A message that was given up. Lists omit the snapshots `event` and `subscriber`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubDeadLetter)]
pub(crate) struct DeadLetterView {
    id: Uuid,
    /// Absent if the log no longer had the event when the message was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    message_id: Option<MessageId>,
    #[serde(flatten)]
    event_reference: EventReference,
    subscriber_id: Uuid,
    /// The name of the subscriber when the message was given up.
    subscriber_name: String,
    /// The lane of the message: messages of one lane are sent one after the other. Absent: the message had none.
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<String>,
    /// The replay that has created the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    replay_id: Option<Uuid>,
    /// Why the message was given up.
    reason: Reason,
    /// The reason in words.
    detail: String,
    /// The number of attempts to deliver the message, including those before an earlier retry.
    attempts: i16,
    /// When the message was given up.
    moved_to_dlq_at: DateTime<Utc>,
    /// Who requested the retry, or the replay that has sent the event to the subscriber again. Absent if the event was not sent again.
    #[serde(skip_serializing_if = "Option::is_none")]
    manual_retry_by: Option<String>,
    /// When the retry was requested, or the replay has sent the event again.
    #[serde(skip_serializing_if = "Option::is_none")]
    manual_retry_at: Option<DateTime<Utc>>,
    /// The event with its payload, as it was when the message was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<EventView>,
    /// A snapshot of the subscriber's settings when the message was given up, without headers and secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    subscriber: Option<Box<RawValue>>,
}

impl DeadLetterView {
    /// The view for lists, without snapshots.
    pub(crate) fn summary(dead: DeadLetter) -> DeadLetterView {
        let subscriber = dead.subscriber;
        DeadLetterView {
            id: dead.id,
            message_id: dead.event_id.map(|event| MessageId { event, subscriber }),
            event_reference: EventReference::new(
                dead.event_id.zip(dead.event_type),
                dead.ordering_key,
                dead.received_at,
            ),
            subscriber_id: dead.subscriber,
            subscriber_name: dead.subscriber_name,
            lane: dead.lane.map(|lane| public_lane(&lane, dead.replay).to_owned()),
            replay_id: dead.replay,
            reason: dead.reason,
            detail: dead.detail,
            attempts: dead.attempts,
            moved_to_dlq_at: dead.moved_to_dlq_at,
            manual_retry_by: dead.manual_retry_by,
            manual_retry_at: dead.manual_retry_at,
            event: None,
            subscriber: None,
        }
    }

    /// The view of a single dead letter, with snapshots.
    pub(crate) fn with_snapshots(found: DeadLetterWithSnapshots) -> DeadLetterView {
        let DeadLetterWithSnapshots { dead_letter, event_snapshot, subscriber_snapshot } = found;
        let event = event_snapshot.map(|event| EventView::of_snapshot(event, dead_letter.ordering_key.clone()));
        DeadLetterView { event, subscriber: Some(subscriber_snapshot), ..DeadLetterView::summary(dead_letter) }
    }
}

/// The result of retrying many dead letters.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RetriedDeadLetters)]
pub(crate) struct Retried {
    /// The number of dead letters that are sent again.
    pub(crate) retried: u64,
    /// Whether matching dead letters remain: repeat the request.
    pub(crate) more: bool,
}

/// The result of discarding many dead letters.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DiscardedDeadLetters)]
pub(crate) struct DiscardedMany {
    /// The number of dead letters that were discarded.
    pub(crate) discarded: u64,
    /// Whether matching dead letters remain: repeat the request.
    pub(crate) more: bool,
}
