//! Who is in, who waits and who may not come in: the rules, for one event at a time.
//!
//! A [`Roster`] is an event with as much of its joins as some orders need. Orders are applied one after the other, in the
//! order in which they came; a seat that becomes free is given to the head of the waitlist before the next order is looked
//! at. What is to be kept and told of it gathers in [`Changes`].
//!
//! What holds, whatever the orders: nobody is active above the capacity, unless it was lowered later. Everyone who waits
//! has a higher seq than everyone who is active. A seq is given to each who joins, from 1, without a gap.

mod order;
mod roster;
mod standing;

use chrono::{DateTime, Utc};
use contracts::events::EventStatus;
use contracts::joins::{Count, JoinStatus};
use kit::trace::TraceContext;
use uuid::Uuid;

pub(crate) use self::order::{Actor, Command, News, Order, Outcome, Refused, Told};
pub(crate) use self::roster::{Changes, Loaded, Roster};
pub(crate) use self::standing::Standing;

/// For events, that it is canceled: nobody comes in.
pub(crate) const CLOSED: i32 = -1;

/// An event as its messages told of it, and how many have joined.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Event {
    pub(crate) id: Uuid,
    pub(crate) owner_id: Uuid,
    pub(crate) status: EventStatus,
    /// 0 is unlimited; [`CLOSED`] when it is canceled.
    pub(crate) capacity: i32,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
    /// Of the news that this is.
    pub(crate) event_version: i64,
    pub(crate) counts: Count,
    pub(crate) next_seq: i64,
    /// When there is something to do that nobody will ask for.
    pub(crate) sweep_at: Option<DateTime<Utc>>,
    /// Of the news that this is: what is swept because of them belongs to it.
    pub(crate) news_trace: Option<TraceContext>,
}

/// Someone's place.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) id: Uuid,
    pub(crate) event_id: Uuid,
    pub(crate) user_id: Uuid,
    pub(crate) status: JoinStatus,
    pub(crate) seq: i64,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
    /// When it was given up or taken away.
    pub(crate) canceled_at: Option<DateTime<Utc>>,
    /// When there was a seat: at once, or by moving up.
    pub(crate) activated_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ban {
    pub(crate) id: Uuid,
    pub(crate) event_id: Uuid,
    pub(crate) user_id: Uuid,
    pub(crate) reason: Option<String>,
    pub(crate) banned_by: String,
    /// None: for ever.
    pub(crate) expires_at: Option<DateTime<Utc>>,
    pub(crate) created_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Joined,
    Canceled,
    Promoted,
    Kicked,
    Banned,
    Unbanned,
    Expired,
    Recounted,
}

/// One change of one person's place, or counts put right: a line of the history, and a message.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) event_id: Uuid,
    /// None: it is about the counts alone.
    pub(crate) user_id: Option<Uuid>,
    pub(crate) action: Action,
    /// None of these if they had not joined.
    pub(crate) join_id: Option<Uuid>,
    pub(crate) seq: Option<i64>,
    pub(crate) from: Option<JoinStatus>,
    pub(crate) to: Option<JoinStatus>,
    pub(crate) by: Actor,
    pub(crate) reason: Option<String>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
    /// After the change.
    pub(crate) counts: Count,
    pub(crate) at: DateTime<Utc>,
    pub(crate) trace: TraceContext,
}

impl Event {
    /// Whether this is nothing to who has not joined it: it was published, and is not any more.
    pub(crate) fn is_hidden_from(&self, user: Option<Uuid>) -> bool {
        self.status == EventStatus::Draft && user != Some(self.owner_id)
    }

    pub(crate) fn has_room(&self) -> bool {
        self.capacity == 0 || self.counts.active < self.capacity
    }

    pub(crate) fn has_ended(&self, now: DateTime<Utc>) -> bool {
        self.end_time <= now
    }

    /// None: unlimited.
    pub(crate) fn seats_left(&self) -> Option<i32> {
        (self.capacity != 0).then(|| (self.capacity - self.counts.active).max(0))
    }

    /// Whether there is something to do that nobody asked for.
    pub(crate) fn is_due(&self, now: DateTime<Utc>) -> bool {
        self.sweep_at.is_some_and(|at| at <= now)
    }

    /// Who has it done when a sweep does it: nobody, when it is only that time goes by.
    pub(crate) fn swept_by(&self, now: DateTime<Utc>) -> Actor {
        match self.status {
            EventStatus::Draft | EventStatus::Published if self.has_ended(now) => Actor::System,
            EventStatus::Draft | EventStatus::Published | EventStatus::Canceled => Actor::Events,
        }
    }

    /// When somebody must be told, or moved up, although nobody asks.
    fn next_sweep(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let Count { active, waitlisted, .. } = self.counts;
        let is_due = match self.status {
            EventStatus::Canceled => active + waitlisted > 0,
            EventStatus::Draft | EventStatus::Published if self.has_ended(now) => waitlisted > 0,
            EventStatus::Published => waitlisted > 0 && self.has_room(),
            EventStatus::Draft => false,
        };
        match is_due {
            true => self.sweep_at.filter(|at| *at <= now).or(Some(now)),
            false => Some(self.end_time).filter(|end| *end > now && self.status != EventStatus::Canceled),
        }
    }
}

impl Entry {
    pub(crate) fn is_in(&self) -> bool {
        match self.status {
            JoinStatus::Active | JoinStatus::Waitlisted => true,
            JoinStatus::Canceled | JoinStatus::Expired | JoinStatus::Rejected => false,
        }
    }
}

impl Ban {
    pub(crate) fn holds(&self, now: DateTime<Utc>) -> bool {
        self.expires_at.is_none_or(|end| end > now)
    }
}

impl Action {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Action::Joined => "joined",
            Action::Canceled => "canceled",
            Action::Promoted => "promoted",
            Action::Kicked => "kicked",
            Action::Banned => "banned",
            Action::Unbanned => "unbanned",
            Action::Expired => "expired",
            Action::Recounted => "recounted",
        }
    }
}
