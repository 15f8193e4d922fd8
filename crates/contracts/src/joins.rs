//! What the joins service says. Messages of one event have its id as their key, so they come in order.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The `source` of all of these.
pub const SOURCE: &str = "joins";

pub const CONFIRMED: &str = "join.confirmed";
pub const CANCELED: &str = "join.canceled";
pub const WAITLISTED: &str = "join.waitlisted";
pub const PROMOTED: &str = "join.promoted";
pub const EXPIRED: &str = "join.expired";
pub const KICKED: &str = "mod.kicked";
pub const BANNED: &str = "mod.banned";
pub const UNBANNED: &str = "mod.unbanned";
/// The counts of an event were not right, here or elsewhere, and are said anew.
pub const RECOUNTED: &str = "join.recounted";
/// Reconciliation: what differs.
pub const COUNTED: &str = "join.counted";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JoinStatus {
    Active,
    Waitlisted,
    Canceled,
    Expired,
    Rejected,
}

impl JoinStatus {
    pub const ALL: [JoinStatus; 5] =
        [JoinStatus::Active, JoinStatus::Waitlisted, JoinStatus::Canceled, JoinStatus::Expired, JoinStatus::Rejected];

    /// As it is written, here and in databases.
    pub fn as_str(self) -> &'static str {
        match self {
            JoinStatus::Active => "active",
            JoinStatus::Waitlisted => "waitlisted",
            JoinStatus::Canceled => "canceled",
            JoinStatus::Expired => "expired",
            JoinStatus::Rejected => "rejected",
        }
    }

    pub fn named(name: &str) -> Option<JoinStatus> {
        JoinStatus::ALL.into_iter().find(|status| status.as_str() == name)
    }
}

/// The payload of all but `join.recounted` and `join.counted`: one person's place, and how many there are after the change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinChanged {
    pub event_id: Uuid,
    pub user_id: Uuid,
    /// Absent for a ban, or its end, of someone who had not joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub join_id: Option<Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<JoinStatus>,
    /// The place in the event's order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Who kicked, banned or unbanned: `user:<id>` or `key:<id>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// When a ban ends; absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<DateTime<Utc>>,
    pub counts: Count,
    pub occurred_at: DateTime<Utc>,
    pub trace_id: String,
}

/// Absolute, so that repeats and disorder cannot make them drift: the highest version is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    pub active: i32,
    pub waitlisted: i32,
    /// Grows with every change of the event's joins.
    pub version: i64,
}

/// The payload of `join.recounted`: nobody's place has changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventRecounted {
    pub event_id: Uuid,
    pub counts: Count,
    pub occurred_at: DateTime<Utc>,
    pub trace_id: String,
}

/// The payload of `join.counted`: the answer to [`crate::events::EventVersions`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinsCounted {
    pub run: Uuid,
    pub part: i32,
    pub dry_run: bool,
    pub force: bool,
    /// How many events were looked at.
    #[serde(default)]
    pub checked: i32,
    /// How many of them were not counted right here.
    pub drifted: i32,
    /// How many of these are being put right; 0 in a dry run.
    pub repaired: i32,
    /// How many there are of those whose participants were stated wrongly.
    pub events: Vec<EventCounted>,
    /// What is to be said again, by [`crate::events::RESTATED`].
    #[serde(default)]
    pub wanted: Vec<Wanted>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventCounted {
    pub event_id: Uuid,
    #[serde(flatten)]
    pub counts: Count,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    pub event_id: Uuid,
    /// The version that is known; 0 if none is. Whoever never gave it was set back, and goes on above it.
    pub version: i64,
}
