//! The JSON representations of the HTTP API.

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::JoinStatus;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::{Ban, Event, HistoryAction, Registration, RegistrationOfUser, StoredEntry};

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Registration)]
pub(crate) struct RegistrationView {
    id: Uuid,
    event_id: Uuid,
    user_id: Uuid,
    /// `active`, `waitlisted`, `canceled`, `expired` or `rejected`.
    #[schema(value_type = String, example = "active")]
    status: JoinStatus,
    /// The sequence number in the event's order of joining. A user who joins again gets a new one.
    seq: i64,
    /// The position in the waitlist, starting at 1. Present in the response to the join request, in `my`, where 10,001
    /// means 10,001 or more, and in the waitlist of the organizer up to 10,001.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<i64>,
    /// Why the organizer or an admin removed the user. Present in `my` and in the user's own list if the status is `rejected`
    /// and a reason was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "Too loud.")]
    reason: Option<String>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    /// When the registration was canceled, rejected or expired.
    #[serde(skip_serializing_if = "Option::is_none")]
    canceled_at: Option<DateTime<Utc>>,
    /// When the registration got a seat: at once, or by promotion.
    #[serde(skip_serializing_if = "Option::is_none")]
    activated_at: Option<DateTime<Utc>>,
}

impl RegistrationView {
    pub(crate) fn new(registration: Registration, position: Option<i64>) -> RegistrationView {
        let Registration { id, event_id, user_id, status, seq, created_at, updated_at, canceled_at, activated_at } =
            registration;
        RegistrationView {
            id,
            event_id,
            user_id,
            status,
            seq,
            position,
            reason: None,
            created_at,
            updated_at,
            canceled_at,
            activated_at,
        }
    }
}

impl From<RegistrationOfUser> for RegistrationView {
    fn from(own: RegistrationOfUser) -> RegistrationView {
        let RegistrationOfUser { registration, ahead, reason } = own;
        RegistrationView { reason, ..RegistrationView::new(registration, ahead.map(|ahead| ahead + 1)) }
    }
}

/// One change of a registration or a ban.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = JoinHistoryEntry)]
pub(crate) struct HistoryEntryView {
    event_id: Uuid,
    /// The version of the event's counts after the change.
    version: i64,
    /// Absent if the counts were corrected, which concerns no user.
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<Uuid>,
    action: HistoryAction,
    /// Absent if the user had never joined.
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<i64>,
    /// The status of the registration before the change; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "active")]
    from: Option<JoinStatus>,
    /// The status of the registration after the change; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "rejected")]
    to: Option<JoinStatus>,
    /// `user:<id>` or `key:<id>`; `events` if it followed from an update of the event; `system` if time passed.
    #[schema(example = "user:01890a5d-ac96-774b-bcce-b302099a8057")]
    actor: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "Too loud.")]
    reason: Option<String>,
    at: DateTime<Utc>,
}

impl From<StoredEntry> for HistoryEntryView {
    fn from(entry: StoredEntry) -> HistoryEntryView {
        let StoredEntry { event_id, version, user_id, action, seq, from, to, actor, reason, at } = entry;
        HistoryEntryView { event_id, version, user_id, action, seq, from, to, actor, reason, at }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = WaitlistPosition)]
pub(crate) struct PositionView {
    /// The status of the registration.
    #[schema(value_type = String, example = "waitlisted")]
    status: JoinStatus,
    /// The position in the waitlist, starting at 1; 10,001 means 10,001 or more. Absent if the status is not
    /// `waitlisted`.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<i64>,
    /// The number of waitlisted registrations ahead; 10,000 means 10,000 or more. Absent if the status is not
    /// `waitlisted`.
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
    /// 0 means unlimited; -1 means that the event is canceled.
    capacity: i32,
    active_count: i32,
    waitlist_count: i32,
    /// Absent if the capacity is unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    seats_left: Option<i32>,
    /// The total number of joins so far, including canceled ones.
    joined_in_all: i64,
    /// Increases with every change of the counts.
    version: i64,
}

impl StatsView {
    pub(crate) fn to_json(&self) -> String {
        // A struct of strings and numbers always serializes.
        serde_json::to_string(self).unwrap_or_default()
    }
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
#[schema(as = GatheringBan)]
pub(crate) struct BanView {
    id: Uuid,
    event_id: Uuid,
    user_id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// `user:<id>` or `key:<id>`.
    banned_by: String,
    /// Absent for a permanent ban.
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
