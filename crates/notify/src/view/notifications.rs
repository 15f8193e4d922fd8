//! JSON of the operators' list of notifications.

use chrono::{DateTime, Utc};
use contracts::EventId;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::delivery_rules::Channel;
use crate::domain::notification::NotificationStatus;
use crate::store::notifications::NotificationRecord;

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Notification)]
pub(crate) struct NotificationView {
    id: i64,
    #[schema(value_type = String, example = "evt_0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11")]
    event_id: EventId,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_type: Option<String>,
    user_id: Uuid,
    channel: Channel,
    status: NotificationStatus,
    /// Present while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    due_at: Option<DateTime<Utc>>,
    /// The failures since it was created or last retried.
    attempts: i32,
    /// Why it was skipped, or why the last attempt failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    created_at: DateTime<Utc>,
}

impl From<NotificationRecord> for NotificationView {
    fn from(record: NotificationRecord) -> NotificationView {
        NotificationView {
            id: record.id,
            event_id: EventId(record.event_id),
            event_type: record.event_type,
            user_id: record.user_id,
            channel: record.channel,
            status: record.status,
            due_at: record.due_at,
            attempts: record.attempts,
            last_error: record.last_error,
            created_at: record.created_at,
        }
    }
}
