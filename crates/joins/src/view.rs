//! What people see.

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::JoinStatus;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::{Ban, Entry, Event};

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Registration)]
pub(crate) struct RegistrationView {
    id: Uuid,
    event_id: Uuid,
    user_id: Uuid,
    /// `active`, `waitlisted`, `canceled`, `expired` or `rejected`.
    #[schema(value_type = String, example = "active")]
    status: JoinStatus,
    /// The place in the event's order of joining; who joins again gets a new one.
    seq: i64,
    /// The place in the waitlist, from 1, in the answer to the join that led there; and in `my`, where 10,001 is that or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<i64>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    /// When it was given up or taken away.
    #[serde(skip_serializing_if = "Option::is_none")]
    canceled_at: Option<DateTime<Utc>>,
    /// When there was a seat: at once, or by moving up.
    #[serde(skip_serializing_if = "Option::is_none")]
    activated_at: Option<DateTime<Utc>>,
}

impl RegistrationView {
    pub(crate) fn new(entry: Entry, position: Option<i64>) -> RegistrationView {
        let Entry { id, event_id, user_id, status, seq, created_at, updated_at, canceled_at, activated_at } = entry;
        RegistrationView {
            id,
            event_id,
            user_id,
            status,
            seq,
            position,
            created_at,
            updated_at,
            canceled_at,
            activated_at,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Position)]
pub(crate) struct PositionView {
    /// As in a registration.
    #[schema(value_type = String, example = "waitlisted")]
    status: JoinStatus,
    /// From 1, where 10,001 is that or later; only on the waitlist, as is `ahead`.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<i64>,
    /// How many are before; 10,000 is so many or more.
    #[serde(skip_serializing_if = "Option::is_none")]
    ahead: Option<i64>,
}

impl PositionView {
    pub(crate) fn new(status: JoinStatus, ahead: Option<i64>) -> PositionView {
        PositionView { status, position: ahead.map(|ahead| ahead + 1), ahead }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = JoinStats)]
pub(crate) struct StatsView {
    event_id: Uuid,
    /// `draft`, `published` or `canceled`.
    #[schema(value_type = String, example = "published")]
    status: EventStatus,
    /// 0 is unlimited, -1 canceled.
    capacity: i32,
    active_count: i32,
    waitlist_count: i32,
    /// Absent when it is unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    seats_left: Option<i32>,
    /// How often somebody joined, in all.
    joined_in_all: i64,
    /// Grows with every change; the `ETag`, too.
    version: i64,
}

impl From<&Event> for StatsView {
    fn from(event: &Event) -> StatsView {
        StatsView {
            event_id: event.id,
            status: event.status,
            capacity: event.capacity,
            active_count: event.counts.active,
            waitlist_count: event.counts.waitlisted,
            seats_left: event.seats_left(),
            joined_in_all: event.next_seq - 1,
            version: event.counts.version,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EventBan)]
pub(crate) struct BanView {
    id: Uuid,
    event_id: Uuid,
    user_id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// `user:<id>` or `key:<id>`.
    banned_by: String,
    /// Absent: for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
}

impl From<Ban> for BanView {
    fn from(ban: Ban) -> BanView {
        let Ban { id, event_id, user_id, reason, banned_by, expires_at, created_at } = ban;
        BanView { id, event_id, user_id, reason, banned_by, expires_at, created_at }
    }
}
