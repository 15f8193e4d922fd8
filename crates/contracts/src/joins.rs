//! Messages that the joins service publishes. The key of a message is the id of its event, so all messages about one
//! event arrive in order.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The `source` of every message in this module.
pub const SOURCE: &str = "joins";

pub const CONFIRMED: &str = "join.confirmed";
pub const CANCELED: &str = "join.canceled";
pub const WAITLISTED: &str = "join.waitlisted";
pub const PROMOTED: &str = "join.promoted";
pub const EXPIRED: &str = "join.expired";
pub const KICKED: &str = "mod.kicked";
pub const BANNED: &str = "mod.banned";
pub const UNBANNED: &str = "mod.unbanned";
/// The counts of an event were wrong in this service or in the events service; the message contains the correct ones.
pub const RECOUNTED: &str = "join.recounted";
/// Reconciliation: the differences found in one part of a run.
pub const COUNTED: &str = "join.counted";

/// The serialized names are also the ones that databases store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, strum::EnumString, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum JoinStatus {
    Active,
    Waitlisted,
    Canceled,
    Expired,
    Rejected,
}

/// The payload of every topic except `join.recounted` and `join.counted`: one user's registration and the event's
/// counts after the change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinChanged {
    pub event_id: Uuid,
    pub user_id: Uuid,
    /// Absent when a user who has never joined is banned or unbanned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub join_id: Option<Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<JoinStatus>,
    /// The status before the change; absent if the user had no registration. A ban whose user was neither active nor waitlisted
    /// ends nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_status: Option<JoinStatus>,
    /// The sequence number of the registration within its event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The moderator of a kick, ban or unban: `user:<id>` or `key:<id>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// The end of a ban; absent for a permanent ban.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<DateTime<Utc>>,
    pub counts: Count,
    pub occurred_at: DateTime<Utc>,
    pub trace_id: String,
}

/// The counts are absolute, so that repeated or reordered messages cannot make them drift. The highest version is
/// correct.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    pub active: i32,
    pub waitlisted: i32,
    /// Increases with every change of the event's registrations.
    pub version: i64,
}

/// The payload of `join.recounted`. No registration has changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventRecounted {
    pub event_id: Uuid,
    pub counts: Count,
    pub occurred_at: DateTime<Utc>,
    pub trace_id: String,
}

/// The payload of `join.counted`: the reply to [`crate::events::EventVersions`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinsCounted {
    pub run: Uuid,
    pub part: i32,
    pub dry_run: bool,
    pub force: bool,
    /// The number of events compared.
    #[serde(default)]
    pub checked: i32,
    /// The number of events whose stored counts in the joins service contradict its rows.
    pub drifted: i32,
    /// The number of those that are being repaired; 0 in a dry run.
    pub repaired: i32,
    /// The correct counts of the events whose participant count in the events service is wrong.
    pub events: Vec<EventCounted>,
    /// The events that the events service must send again as [`crate::events::RESTATED`].
    #[serde(default)]
    pub wanted: Vec<RestateRequest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventCounted {
    pub event_id: Uuid,
    #[serde(flatten)]
    pub counts: Count,
}

/// A request to restate one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestateRequest {
    pub event_id: Uuid,
    /// The version that the joins service has; 0 if it does not know the event. If the events service never issued this
    /// version, its database was restored from a backup, and it continues with a higher one.
    pub version: i64,
}
