//! The rules for registrations, waitlists and bans of one event.
//!
//! [`EventRegistrations`] is an event with those of its registrations that a list of commands needs. The commands are
//! applied one after the other, in the order of their arrival. A freed seat goes to the head of the waitlist before the
//! next command is applied. The rows, history entries and messages to write are collected in [`Changes`].
//!
//! Invariants, whatever the commands: the number of active registrations never exceeds the capacity, unless the
//! capacity was lowered later. Every waitlisted registration has a higher sequence number than every active one.
//! Sequence numbers start at 1 and have no gaps.

mod command;
mod reconciliation;
mod registrations;

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use runtime::trace::TraceContext;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

pub(crate) use self::command::{Actor, Command, CommandKind, EventUpdate, Outcome, Refused, ReportedCount};
pub(crate) use self::reconciliation::KnownEvent;
pub(crate) use self::registrations::{Changes, EventRegistrations, LoadedRegistrations};

/// The capacity of a canceled event, which accepts no joins.
pub(crate) const CLOSED: i32 = -1;

/// An event as last reported by the events service, and its counts.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct Event {
    #[sqlx(rename = "event_id")]
    pub(crate) id: Uuid,
    pub(crate) owner_id: Uuid,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: EventStatus,
    /// 0 means unlimited; [`CLOSED`] if the event is canceled.
    pub(crate) capacity: i32,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
    /// The version of the last update that was applied.
    pub(crate) event_version: i64,
    #[sqlx(flatten, try_from = "StoredCount")]
    pub(crate) counts: Count,
    pub(crate) next_seq: i64,
    /// When the next sweep is due; None if there is nothing to sweep.
    pub(crate) sweep_at: Option<DateTime<Utc>>,
    /// The trace of the last update that was applied. A sweep that follows from the update belongs to the same trace.
    #[sqlx(try_from = "NullableText<'a>")]
    pub(crate) update_trace: Option<TraceContext>,
}

/// The columns of the counts that are stored with an event.
#[derive(sqlx::FromRow)]
struct StoredCount {
    active_count: i32,
    waitlist_count: i32,
    version: i64,
}

impl From<StoredCount> for Count {
    fn from(stored: StoredCount) -> Count {
        Count { active: stored.active_count, waitlisted: stored.waitlist_count, version: stored.version }
    }
}

/// A text column that can be null.
#[derive(sqlx::Type)]
#[sqlx(transparent)]
struct NullableText<'a>(Option<&'a str>);

impl From<NullableText<'_>> for Option<TraceContext> {
    fn from(text: NullableText<'_>) -> Option<TraceContext> {
        text.0.and_then(|text| text.parse().ok())
    }
}

impl TryFrom<NullableText<'_>> for Option<JoinStatus> {
    type Error = strum::ParseError;

    fn try_from(text: NullableText<'_>) -> Result<Option<JoinStatus>, strum::ParseError> {
        text.0.map(str::parse).transpose()
    }
}

/// The numbers of active and waitlisted registrations of an event, counted from the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct RowCounts {
    pub(crate) active: i32,
    pub(crate) waitlisted: i32,
}

/// One user's registration for one event.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct Registration {
    pub(crate) id: Uuid,
    pub(crate) event_id: Uuid,
    pub(crate) user_id: Uuid,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: JoinStatus,
    pub(crate) seq: i64,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
    /// When it was canceled, rejected or expired.
    pub(crate) canceled_at: Option<DateTime<Utc>>,
    /// When it got a seat: at once, or by promotion.
    pub(crate) activated_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct Ban {
    pub(crate) id: Uuid,
    pub(crate) event_id: Uuid,
    pub(crate) user_id: Uuid,
    pub(crate) reason: Option<String>,
    pub(crate) banned_by: String,
    /// None for a permanent ban.
    pub(crate) expires_at: Option<DateTime<Utc>>,
    pub(crate) created_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema, strum::EnumString, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[schema(as = JoinAction)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub(crate) enum HistoryAction {
    Joined,
    Canceled,
    Promoted,
    Kicked,
    Banned,
    Unbanned,
    Expired,
    Recounted,
}

/// One change of a registration or a ban, or a correction of the counts. Each becomes a row of the history and a
/// message.
#[derive(Debug, Clone)]
pub(crate) struct HistoryEntry {
    pub(crate) event_id: Uuid,
    /// None for a correction of the counts.
    pub(crate) user_id: Option<Uuid>,
    pub(crate) action: HistoryAction,
    /// None if the user has never joined, like `seq`, `from` and `to`.
    pub(crate) join_id: Option<Uuid>,
    pub(crate) seq: Option<i64>,
    pub(crate) from: Option<JoinStatus>,
    pub(crate) to: Option<JoinStatus>,
    pub(crate) by: Actor,
    pub(crate) reason: Option<String>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
    /// The counts after the change.
    pub(crate) counts: Count,
    pub(crate) at: DateTime<Utc>,
    pub(crate) trace: TraceContext,
}

/// An entry of the history as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct StoredEntry {
    pub(crate) event_id: Uuid,
    /// The version of the event's counts after the change.
    pub(crate) version: i64,
    /// None for a correction of the counts.
    pub(crate) user_id: Option<Uuid>,
    #[sqlx(try_from = "&'a str")]
    pub(crate) action: HistoryAction,
    pub(crate) seq: Option<i64>,
    #[sqlx(rename = "from_status", try_from = "NullableText<'a>")]
    pub(crate) from: Option<JoinStatus>,
    #[sqlx(rename = "to_status", try_from = "NullableText<'a>")]
    pub(crate) to: Option<JoinStatus>,
    /// The text of an [`Actor`].
    #[sqlx(rename = "by")]
    pub(crate) actor: String,
    pub(crate) reason: Option<String>,
    pub(crate) at: DateTime<Utc>,
}

/// A registration as its user sees it.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct RegistrationOfUser {
    #[sqlx(flatten)]
    pub(crate) registration: Registration,
    /// The number of waitlisted registrations ahead of it, if it is waitlisted and the number was asked for.
    pub(crate) ahead: Option<i64>,
    /// Why the user was removed, if the registration is rejected and the moderator gave a reason.
    pub(crate) reason: Option<String>,
}

/// A waitlisted registration as the organizer sees it.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct WaitlistEntry {
    #[sqlx(flatten)]
    pub(crate) registration: Registration,
    /// The number of waitlisted registrations ahead of it; None if there are too many to be counted.
    pub(crate) ahead: Option<i64>,
}

impl Event {
    /// Whether the event does not exist for this user: it was unpublished, and the user is not the owner.
    pub(crate) fn is_hidden_from(&self, user: Option<Uuid>) -> bool {
        self.status == EventStatus::Draft && user != Some(self.owner_id)
    }

    pub(crate) fn has_free_seat(&self) -> bool {
        self.capacity == 0 || self.counts.active < self.capacity
    }

    pub(crate) fn has_ended(&self, now: DateTime<Utc>) -> bool {
        self.end_time <= now
    }

    /// The number of free seats; None if the capacity is unlimited.
    pub(crate) fn seats_left(&self) -> Option<i32> {
        (self.capacity != 0).then(|| (self.capacity - self.counts.active).max(0))
    }

    /// Whether a sweep is due.
    pub(crate) fn is_due(&self, now: DateTime<Utc>) -> bool {
        self.sweep_at.is_some_and(|at| at <= now)
    }

    /// The actor of a sweep: the system if the event has merely ended, else the events service, whose update caused it.
    pub(crate) fn sweep_actor(&self, now: DateTime<Utc>) -> Actor {
        match self.status {
            EventStatus::Draft | EventStatus::Published if self.has_ended(now) => Actor::System,
            EventStatus::Draft | EventStatus::Published | EventStatus::Canceled => Actor::Events,
        }
    }

    /// When registrations must be expired or promoted without a command; None if never.
    fn next_sweep(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let Count { active, waitlisted, .. } = self.counts;
        let is_due = match self.status {
            EventStatus::Canceled => active + waitlisted > 0,
            EventStatus::Draft | EventStatus::Published if self.has_ended(now) => waitlisted > 0,
            EventStatus::Published => waitlisted > 0 && self.has_free_seat(),
            EventStatus::Draft => false,
        };
        if is_due {
            self.sweep_at.filter(|at| *at <= now).or(Some(now))
        } else {
            Some(self.end_time).filter(|end| *end > now && self.status != EventStatus::Canceled)
        }
    }
}

impl Registration {
    /// Whether the user has a seat or is on the waitlist.
    pub(crate) fn is_current(&self) -> bool {
        match self.status {
            JoinStatus::Active | JoinStatus::Waitlisted => true,
            JoinStatus::Canceled | JoinStatus::Expired | JoinStatus::Rejected => false,
        }
    }
}

impl Ban {
    pub(crate) fn is_in_force(&self, now: DateTime<Utc>) -> bool {
        self.expires_at.is_none_or(|end| end > now)
    }
}
