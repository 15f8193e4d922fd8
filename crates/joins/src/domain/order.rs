//! What may be asked, and what comes of it.

use std::fmt;

use chrono::{DateTime, Utc};
use contracts::events::{EventChanged, EventStatus};
use kit::auth::Principal;
use kit::trace::TraceContext;
use uuid::Uuid;

use super::{Ban, CLOSED, Entry};

/// Something to be done with the joins of one event.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    pub(crate) event_id: Uuid,
    pub(crate) command: Command,
    pub(crate) actor: Actor,
    /// Of what it makes, if it makes anything: the same each time it is tried.
    pub(crate) new_id: Uuid,
    pub(crate) trace: TraceContext,
}

#[derive(Debug, Clone)]
pub(crate) enum Command {
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
    Learn {
        news: News,
    },
    /// Put the counts right, by the rows, and say them anew to who was told something else.
    Recount {
        told: Told,
    },
    /// Do what is due without being asked, or a part of it.
    Sweep,
}

/// What others believe the counts to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) active: i32,
    pub(crate) version: i64,
}

/// Who had it done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Actor {
    Caller(Principal),
    /// It follows from an event's news.
    Events,
    /// It is done by itself.
    System,
}

/// What an event's message says of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct News {
    pub(crate) event_id: Uuid,
    pub(crate) version: i64,
    pub(crate) status: EventStatus,
    pub(crate) owner_id: Uuid,
    pub(crate) capacity: i32,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
}

/// What came of an order that was followed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    /// With the place in the waitlist, if that is where it led.
    Joined(Entry, Option<i32>),
    /// They were in already: nothing happened.
    In(Entry),
    Canceled(Entry),
    Kicked(Entry),
    Banned(Ban),
    Unbanned,
    /// False: older than what is known.
    Learned(bool),
    /// Whether they were wrong.
    Recounted(bool),
    Swept,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("there is no such event, or it was not published yet")]
    NoEvent,
    #[error("this event is not published: nobody can join it now")]
    NotPublished,
    #[error("this event is canceled: nobody can join it any more")]
    EventCanceled,
    #[error("this event ended at {0}: nobody can join it any more")]
    Ended(DateTime<Utc>),
    #[error("{}", banned(.0))]
    Banned(Option<DateTime<Utc>>),
    #[error("there is no one to take out: they are neither in nor on the waitlist")]
    NotIn,
    #[error("you are neither in this event nor on its waitlist")]
    NothingToCancel,
    #[error("they are not banned from this event")]
    NotBanned,
    #[error("a ban takes a time in the future, or nothing for ever")]
    BanInThePast,
}

impl Refused {
    /// Whether the event may be told of, or published, a moment later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Refused::NoEvent | Refused::NotPublished => true,
            Refused::EventCanceled
            | Refused::Ended(_)
            | Refused::Banned(_)
            | Refused::NotIn
            | Refused::NothingToCancel
            | Refused::NotBanned
            | Refused::BanInThePast => false,
        }
    }
}

fn banned(until: &Option<DateTime<Utc>>) -> String {
    match until {
        Some(until) => format!("you are banned from this event until {until}"),
        None => "you are banned from this event".to_owned(),
    }
}

impl News {
    /// The capacity as it is kept.
    pub(super) fn seats(&self) -> i32 {
        match self.status {
            EventStatus::Canceled => CLOSED,
            EventStatus::Draft | EventStatus::Published => self.capacity.max(0),
        }
    }
}

impl From<&EventChanged> for News {
    fn from(event: &EventChanged) -> News {
        News {
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

impl Command {
    /// Whom it is about, if it is about one person.
    pub(crate) fn user(&self) -> Option<Uuid> {
        match self {
            Command::Join { user }
            | Command::Cancel { user }
            | Command::Kick { user, .. }
            | Command::Ban { user, .. }
            | Command::Unban { user } => Some(*user),
            Command::Learn { .. } | Command::Recount { .. } | Command::Sweep => None,
        }
    }

    pub(crate) fn news(&self) -> Option<&News> {
        if let Command::Learn { news } = self { Some(news) } else { None }
    }

    /// How many may move up because of it, or fall out of the head of the waitlist; None: as many as there are.
    pub(crate) fn frees(&self) -> Option<i32> {
        match self {
            // Who opens the ledger reads what a sweep needs.
            Command::Join { .. } | Command::Unban { .. } | Command::Sweep => Some(0),
            Command::Cancel { .. } | Command::Kick { .. } | Command::Ban { .. } => Some(1),
            Command::Learn { .. } | Command::Recount { .. } => None,
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
