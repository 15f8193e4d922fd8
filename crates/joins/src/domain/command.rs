//! Commands on the registrations of one event, their outcomes, and the reasons for refusing them.

use std::fmt;

use chrono::{DateTime, Utc};
use contracts::events::{EventChanged, EventStatus};
use http_kit::auth::Principal;
use runtime::trace::TraceContext;
use uuid::Uuid;

use super::{Ban, CLOSED, Registration};

/// A request to change the registrations of one event.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) event_id: Uuid,
    pub(crate) kind: CommandKind,
    pub(crate) actor: Actor,
    /// The id of the registration or ban that the command may create. It stays the same when the batch is retried.
    pub(crate) new_id: Uuid,
    pub(crate) trace: TraceContext,
}

#[derive(Debug, Clone)]
pub(crate) enum CommandKind {
    Join {
        user: Uuid,
    },
    Cancel {
        user: Uuid,
    },
    Kick {
        user: Uuid,
        reason: Option<String>,
    },
    Ban {
        user: Uuid,
        reason: Option<String>,
        expires_at: Option<DateTime<Utc>>,
    },
    Unban {
        user: Uuid,
    },
    /// Apply an update of the event that the events service published.
    UpdateEvent {
        update: EventUpdate,
    },
    /// Correct the stored counts from the rows, and publish them if the events service has different ones.
    Recount {
        reported: ReportedCount,
    },
    /// Expire or promote the registrations that are due, or one step of them.
    Sweep,
}

/// The participant count that the events service has, as it reported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportedCount {
    pub(crate) active: i32,
    pub(crate) version: i64,
}

/// The originator of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Actor {
    Caller(Principal),
    /// The events service, through an update of the event.
    Events,
    /// This service, because time has passed.
    System,
}

/// The fields of an event message that matter to this service.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EventUpdate {
    pub(crate) event_id: Uuid,
    pub(crate) version: i64,
    pub(crate) status: EventStatus,
    pub(crate) owner_id: Uuid,
    pub(crate) capacity: i32,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
}

/// The result of an accepted command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    /// With the position in the waitlist, starting at 1, if the registration is waitlisted.
    Joined(Registration, Option<i32>),
    /// The user had a seat or was on the waitlist; nothing changed.
    AlreadyJoined(Registration),
    Canceled(Registration),
    Kicked(Registration),
    Banned(Ban),
    Unbanned,
    /// False if the stored event has the same or a higher version.
    EventUpdated(bool),
    /// Whether the counts were corrected or published again.
    Recounted(bool),
    Swept,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("this event does not exist here; if it was published this moment, try again in a second")]
    EventNotFound,
    #[error("this event is not published; it can be joined after its owner has published it")]
    NotPublished,
    #[error("this event is canceled and can no longer be joined")]
    EventCanceled,
    #[error("this event ended at {0} and can no longer be joined")]
    Ended(DateTime<Utc>),
    #[error("{}", ban_detail(*.until, .reason.as_deref()))]
    Banned { until: Option<DateTime<Utc>>, reason: Option<String> },
    #[error("this user has no seat in the event and is not on its waitlist")]
    NotRegistered,
    #[error("you have no seat in this event and are not on its waitlist")]
    NothingToCancel,
    #[error("this user is not banned from the event")]
    NotBanned,
    #[error("must be a time in the future; omit it for a permanent ban")]
    BanInThePast,
}

impl Refused {
    /// Whether the same request may succeed shortly: the event may be about to become known or published.
    pub(crate) fn is_temporary(&self) -> bool {
        match self {
            Refused::EventNotFound | Refused::NotPublished => true,
            Refused::EventCanceled
            | Refused::Ended(_)
            | Refused::Banned { .. }
            | Refused::NotRegistered
            | Refused::NothingToCancel
            | Refused::NotBanned
            | Refused::BanInThePast => false,
        }
    }
}

fn ban_detail(until: Option<DateTime<Utc>>, reason: Option<&str>) -> String {
    let until = until.map(|until| format!(" until {until}")).unwrap_or_default();
    let reason = reason.map(|reason| format!("; the reason: {reason}")).unwrap_or_default();
    format!("you are banned from this event{until}{reason}")
}

impl EventUpdate {
    /// The capacity as stored: [`CLOSED`] if the event is canceled.
    pub(super) fn stored_capacity(&self) -> i32 {
        match self.status {
            EventStatus::Canceled => CLOSED,
            EventStatus::Draft | EventStatus::Published => self.capacity.max(0),
        }
    }
}

impl From<&EventChanged> for EventUpdate {
    fn from(event: &EventChanged) -> EventUpdate {
        EventUpdate {
            event_id: event.event_id,
            version: event.version,
            status: event.status,
            owner_id: event.owner_id,
            capacity: event.capacity,
            start_time: event.start_time,
            end_time: event.end_time,
        }
    }
}

impl CommandKind {
    /// The user whose registration or ban the command changes; None if it concerns the whole event.
    pub(crate) fn user(&self) -> Option<Uuid> {
        match self {
            CommandKind::Join { user }
            | CommandKind::Cancel { user }
            | CommandKind::Kick { user, .. }
            | CommandKind::Ban { user, .. }
            | CommandKind::Unban { user } => Some(*user),
            CommandKind::UpdateEvent { .. } | CommandKind::Recount { .. } | CommandKind::Sweep => None,
        }
    }

    pub(crate) fn event_update(&self) -> Option<&EventUpdate> {
        if let CommandKind::UpdateEvent { update } = self { Some(update) } else { None }
    }

    /// The number of waitlisted registrations that the command can promote or remove from the head of the waitlist;
    /// None if it is unlimited.
    pub(crate) fn waitlist_demand(&self) -> Option<i32> {
        match self {
            // The command batch loads the rows for a sweep itself.
            CommandKind::Join { .. } | CommandKind::Unban { .. } | CommandKind::Sweep => Some(0),
            CommandKind::Cancel { .. } | CommandKind::Kick { .. } | CommandKind::Ban { .. } => Some(1),
            CommandKind::UpdateEvent { .. } | CommandKind::Recount { .. } => None,
        }
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Actor::Caller(principal) => principal.fmt(f),
            Actor::Events => f.write_str("events"),
            Actor::System => f.write_str("system"),
        }
    }
}
