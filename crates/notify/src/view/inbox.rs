//! JSON of the inbox.

use chrono::{DateTime, Utc};
use contracts::EventId;
use serde::Serialize;
use utoipa::ToSchema;

use crate::domain::business_event::{BusinessEvent, Subject};
use crate::store::inbox::{InboxEntry, InboxState};
use crate::templates::Templates;
use crate::templates::notification::render_in_app;

/// A notification in the inbox.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InboxItem {
    /// The number in the inbox of the user.
    #[schema(example = 17)]
    seq: i64,
    #[schema(value_type = String, example = "evt_0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11")]
    event_id: EventId,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "join.promoted")]
    event_type: Option<String>,
    /// The resource to open.
    #[serde(skip_serializing_if = "Option::is_none")]
    subject: Option<Subject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<i64>,
    /// Plain text, in the locale of the user.
    title: String,
    /// Plain text, in the locale of the user.
    text: String,
    created_at: DateTime<Utc>,
    /// Absent while it is unread.
    #[serde(skip_serializing_if = "Option::is_none")]
    read_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    archived_at: Option<DateTime<Utc>>,
}

/// The number of unread notifications.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = InboxState)]
pub(crate) struct InboxStateView {
    unread_count: i32,
    /// The number of the newest notification; 0 if there was none.
    last_seq: i64,
}

impl InboxItem {
    /// With the text for a user of this name and locale.
    pub(crate) fn new(entry: InboxEntry, templates: &Templates, name: &str, locale: &str) -> InboxItem {
        let (title, text) =
            entry.event.as_ref().map(|event| render_in_app(templates, event, name, locale)).unwrap_or_default();
        let event = entry.event;
        InboxItem {
            seq: entry.seq,
            event_id: EventId(entry.event_id),
            event_type: event.as_ref().map(|event| event.event_type.clone()),
            subject: event.as_ref().and_then(BusinessEvent::subject),
            aggregate_type: event.as_ref().and_then(|event| event.aggregate_type.clone()),
            aggregate_id: event.as_ref().and_then(|event| event.aggregate_id),
            title,
            text,
            created_at: entry.created_at,
            read_at: entry.read_at,
            archived_at: entry.archived_at,
        }
    }
}

impl From<InboxState> for InboxStateView {
    fn from(state: InboxState) -> InboxStateView {
        InboxStateView { unread_count: state.unread, last_seq: state.last_seq }
    }
}
