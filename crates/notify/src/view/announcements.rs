//! JSON of the operators' list of announcements.

use chrono::{DateTime, Utc};
use contracts::EventId;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::store::announcements::AnnouncementRecord;

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Announcement)]
pub(crate) struct AnnouncementView {
    id: i64,
    /// The event that people are notified of.
    #[schema(value_type = String, example = "evt_0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11")]
    event_id: EventId,
    /// The event whose participants are notified, or the aggregate whose recipients are, such as `RESTAURANT:5`.
    subject: String,
    /// The last user who was notified, by the order of the ids. Absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_user: Option<Uuid>,
    /// When it continues. Absent if it was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    due_at: Option<DateTime<Utc>>,
    /// The failures since its last step.
    attempts: i32,
    /// Why the last attempt failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
}

impl From<AnnouncementRecord> for AnnouncementView {
    fn from(record: AnnouncementRecord) -> AnnouncementView {
        AnnouncementView {
            id: record.id,
            event_id: EventId(record.business_event),
            subject: record.subject,
            last_user: record.last_user,
            due_at: record.due_at,
            attempts: record.attempts,
            last_error: record.last_error,
        }
    }
}
