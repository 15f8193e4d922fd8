//! The JSON representations of the HTTP API.

use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::{Event, Status, StatusChange};

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Gathering)]
pub(crate) struct EventView {
    #[serde(flatten)]
    summary: EventSummary,
    description: String,
}

/// An event without its description, for lists.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = GatheringSummary)]
pub(crate) struct EventSummary {
    id: Uuid,
    owner_id: Uuid,
    title: String,
    #[schema(example = "Zürich")]
    city: String,
    category: String,
    start_time: DateTime<Utc>,
    end_time: DateTime<Utc>,
    /// IANA name.
    #[schema(example = "Europe/Zurich")]
    time_zone: String,
    /// 0 means unlimited.
    capacity: i32,
    status: Status,
    active_participants: i32,
    cover_image_ids: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    published_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    canceled_at: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    /// Increases with every change of the event, but not with a change of `active_participants`.
    version: i64,
}

/// A change of an event's status.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = GatheringStatusChange)]
pub(crate) struct StatusChangeView {
    event_id: Uuid,
    /// The version of the event after the change.
    version: i64,
    /// Absent for the creation of the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<Status>,
    to: Status,
    /// The id of the user or of the API key that made the change.
    by: Uuid,
    /// `user:<id>` or `key:<id>`. If it is not the owner of the event, it is an admin.
    #[schema(example = "user:01890a5d-ac96-774b-bcce-b302099a8057")]
    actor: String,
    /// Why the event was canceled or unpublished, if a reason was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "The venue is closed.")]
    reason: Option<String>,
    at: DateTime<Utc>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Cities {
    /// The cities with the most events come first.
    pub(crate) items: Vec<City>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct City {
    #[schema(example = "Zürich")]
    pub(crate) city: String,
    /// The number of published events in the city.
    pub(crate) events: i64,
}

impl EventView {
    pub(crate) fn to_json(&self) -> Vec<u8> {
        // A struct of strings, numbers and times always serializes.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

impl From<Event> for EventView {
    fn from(mut event: Event) -> EventView {
        let description = std::mem::take(&mut event.details.description);
        EventView { summary: event.into(), description }
    }
}

impl From<Event> for EventSummary {
    fn from(event: Event) -> EventSummary {
        let details = event.details;
        EventSummary {
            id: event.id,
            owner_id: event.owner_id,
            title: details.title,
            city: details.city.spelled,
            category: details.category.spelled,
            start_time: details.start_time,
            end_time: details.end_time,
            time_zone: details.time_zone,
            capacity: details.capacity,
            status: event.status,
            active_participants: event.active_participants,
            cover_image_ids: details.cover_image_ids,
            published_at: event.published_at,
            canceled_at: event.canceled_at,
            created_at: event.created_at,
            updated_at: event.updated_at,
            version: event.version,
        }
    }
}

impl From<StatusChange> for StatusChangeView {
    fn from(change: StatusChange) -> StatusChangeView {
        let StatusChange { event_id, version, from, to, by, reason, at } = change;
        StatusChangeView { event_id, version, from, to, by: by.id(), actor: by.to_string(), reason, at }
    }
}
