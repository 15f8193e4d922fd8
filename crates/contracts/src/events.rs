//! What the events service says. Messages of one event have its id as their key, so they come in order.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The `source` of all of these.
pub const SOURCE: &str = "events";

pub const PUBLISHED: &str = "event.published";
pub const UPDATED: &str = "event.updated";
pub const UNPUBLISHED: &str = "event.unpublished";
pub const CANCELED: &str = "event.canceled";
/// Reconciliation: which versions the events service has of some events.
pub const VERSIONS: &str = "event.versions";
/// Reconciliation: an event said again, because it was not known as it is.
pub const RESTATED: &str = "event.restated";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventStatus {
    Draft,
    Published,
    Canceled,
}

impl EventStatus {
    pub const ALL: [EventStatus; 3] = [EventStatus::Draft, EventStatus::Published, EventStatus::Canceled];

    /// As it is written, here and in databases.
    pub fn as_str(self) -> &'static str {
        match self {
            EventStatus::Draft => "draft",
            EventStatus::Published => "published",
            EventStatus::Canceled => "canceled",
        }
    }

    pub fn named(name: &str) -> Option<EventStatus> {
        EventStatus::ALL.into_iter().find(|status| status.as_str() == name)
    }
}

/// The payload of `event.published`, `event.updated`, `event.unpublished` and `event.canceled`: the event as it is after the
/// change. Who has a higher `version` of it already has newer news.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventChanged {
    pub event_id: Uuid,
    /// Grows with every change of the event.
    pub version: i64,
    pub status: EventStatus,
    pub owner_id: Uuid,
    pub title: String,
    pub city: String,
    pub category: String,
    pub start_time: DateTime<Utc>,
    pub end_time: DateTime<Utc>,
    /// IANA.
    pub time_zone: String,
    /// 0 is unlimited.
    pub capacity: i32,
    pub occurred_at: DateTime<Utc>,
}

/// The payload of `event.versions`: some events, as little of each as is needed to see whether the joins service has the same.
/// It answers with [`crate::joins::JoinsCounted`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventVersions {
    /// The reconciliation that it belongs to.
    pub run: Uuid,
    /// Which part of it, from 0.
    pub part: i32,
    /// Only look, repair nothing.
    pub dry_run: bool,
    /// Take no version on trust: all of these are to be said again, under new versions.
    pub force: bool,
    pub events: Vec<EventVersion>,
}

/// Written as a list of its fields, since a run names every event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "EventVersionFields", into = "EventVersionFields")]
pub struct EventVersion {
    pub event_id: Uuid,
    pub version: i64,
    pub status: EventStatus,
    /// As [`crate::joins::Count`] has it; 0 before the first.
    pub count_version: i64,
    pub active_participants: i32,
}

type EventVersionFields = (Uuid, i64, EventStatus, i64, i32);

impl From<EventVersionFields> for EventVersion {
    fn from((event_id, version, status, count_version, active_participants): EventVersionFields) -> EventVersion {
        EventVersion { event_id, version, status, count_version, active_participants }
    }
}

impl From<EventVersion> for EventVersionFields {
    fn from(event: EventVersion) -> EventVersionFields {
        (event.event_id, event.version, event.status, event.count_version, event.active_participants)
    }
}

/// The payload of `event.restated`: news like any other, and what is believed of the participants, so that the joins service
/// can say it better.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventRestated {
    #[serde(flatten)]
    pub event: EventChanged,
    pub active_participants: i32,
    pub count_version: i64,
}
