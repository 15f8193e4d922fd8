//! Messages that the events service publishes. The key of a message is the id of its event, so all messages about one
//! event arrive in order.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The `source` of every message in this module.
pub const SOURCE: &str = "events";

pub const PUBLISHED: &str = "event.published";
pub const UPDATED: &str = "event.updated";
pub const UNPUBLISHED: &str = "event.unpublished";
pub const CANCELED: &str = "event.canceled";
/// Reconciliation: the versions that the events service has of some events.
pub const VERSIONS: &str = "event.versions";
/// The current state of an event, repeated because the joins service has a different one, or because a service is new.
pub const RESTATED: &str = "event.restated";

/// The serialized names are also the ones that databases store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, strum::EnumString, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum EventStatus {
    Draft,
    Published,
    Canceled,
}

/// The payload of `event.published`, `event.updated`, `event.unpublished` and `event.canceled`: the event after the
/// change. A reader that already has a higher `version` ignores the message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventChanged {
    pub event_id: Uuid,
    /// Increases with every change of the event.
    pub version: i64,
    pub status: EventStatus,
    pub owner_id: Uuid,
    pub title: String,
    pub city: String,
    pub category: String,
    pub start_time: DateTime<Utc>,
    pub end_time: DateTime<Utc>,
    /// IANA name.
    pub time_zone: String,
    /// 0 means unlimited.
    pub capacity: i32,
    /// Why the event was canceled or unpublished, if a reason was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The admin who canceled or unpublished the event of another user: `user:<id>` or `key:<id>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    pub occurred_at: DateTime<Utc>,
}

/// The payload of `event.versions`: for some events, the fields that the joins service needs to detect a difference.
/// The joins service replies with [`crate::joins::JoinsCounted`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventVersions {
    /// The id of the reconciliation run.
    pub run: Uuid,
    /// The number of this part within the run, starting at 0.
    pub part: i32,
    /// Report differences without repairing them.
    pub dry_run: bool,
    /// Trust no version: restate every event under a new version.
    pub force: bool,
    pub events: Vec<EventVersion>,
}

/// Serialized as an array of its fields to save space, because a run contains every event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "EventVersionFields", into = "EventVersionFields")]
pub struct EventVersion {
    pub event_id: Uuid,
    pub version: i64,
    pub status: EventStatus,
    /// The version of the last [`crate::joins::Count`] received; 0 before the first.
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

/// The payload of `event.restated`: the event as in [`EventChanged`], plus the participant count that the events
/// service has, so that the joins service can correct it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventRestated {
    #[serde(flatten)]
    pub event: EventChanged,
    pub active_participants: i32,
    pub count_version: i64,
}
