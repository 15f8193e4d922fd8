//! Messages of the notify service: business events, which other applications post with `pillarbox.notify` or by HTTP. The topic
//! is the type of the event, and the key its aggregate, such as `RESTAURANT:5`, unless the producer chooses another.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::{EventId, MESSAGE_BYTES_MAX};

/// The source of these messages.
pub const SOURCE: &str = "notify";

/// The topic of the hub event of a notification is this and the event type, such as `notification.order.paid`.
pub const NOTIFICATION_TOPIC_PREFIX: &str = "notification.";

/// The longest event type, in characters: its hub event has a topic of at most 200.
pub const EVENT_TYPE_CHARS_MAX: usize = 200 - NOTIFICATION_TOPIC_PREFIX.len();

/// The space for the other fields of a [`NotificationPosted`] beside the payload, in bytes.
const WRAPPER_BYTES_MAX: usize = 512;

/// The largest payload of a business event, in bytes: its hub event is also a message. `pillarbox.notify` has the same limit.
pub const PAYLOAD_BYTES_MAX: usize = MESSAGE_BYTES_MAX - WRAPPER_BYTES_MAX;

/// The payload of the hub event of a notification over the channel `webhook`, in the tenant of its recipient.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NotificationPosted {
    /// The event that the notification is about.
    pub event_id: EventId,
    pub event_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate_id: Option<i64>,
    /// The recipient.
    pub user_id: Uuid,
    /// The payload of the event, as it was posted.
    pub payload: Box<RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hub_event_of_the_largest_business_event_is_a_message() {
        let payload = format!("\"{}\"", "x".repeat(PAYLOAD_BYTES_MAX - 2));
        let posted = NotificationPosted {
            event_id: EventId(Uuid::max()),
            event_type: "x".repeat(EVENT_TYPE_CHARS_MAX),
            aggregate_type: Some("X".repeat(50)),
            aggregate_id: Some(i64::MIN),
            user_id: Uuid::max(),
            payload: RawValue::from_string(payload).unwrap(),
        };
        let bytes = serde_json::to_string(&posted).unwrap().len();
        assert!(bytes <= MESSAGE_BYTES_MAX, "{bytes}");
    }
}
