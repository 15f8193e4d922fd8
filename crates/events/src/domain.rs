//! What an event is, and what may become of it.

use std::fmt;

use chrono::{DateTime, Utc};
use contracts::events::{EventChanged, EventStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = EventStatus)]
pub enum Status {
    /// Its owner alone sees it.
    Draft,
    Published,
    /// For good.
    Canceled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Update,
    Publish,
    Unpublish,
    Cancel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event that is {from} cannot be {action}")]
pub struct Refused {
    pub from: Status,
    pub action: Action,
}

impl Status {
    pub const ALL: [Status; 3] = [Status::Draft, Status::Published, Status::Canceled];

    /// Every legal move. What is not listed is refused.
    pub fn after(self, action: Action) -> Result<Status, Refused> {
        match (self, action) {
            (Status::Draft | Status::Published, Action::Update) => Ok(self),
            (Status::Draft, Action::Publish) => Ok(Status::Published),
            (Status::Published, Action::Unpublish) => Ok(Status::Draft),
            (Status::Draft | Status::Published, Action::Cancel) => Ok(Status::Canceled),
            (from, action) => Err(Refused { from, action }),
        }
    }

    pub fn as_str(self) -> &'static str {
        EventStatus::from(self).as_str()
    }

    pub fn named(name: &str) -> Option<Status> {
        Status::ALL.into_iter().find(|status| status.as_str() == name)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Update => "changed",
            Action::Publish => "published",
            Action::Unpublish => "unpublished",
            Action::Cancel => "canceled",
        })
    }
}

impl From<Status> for EventStatus {
    fn from(status: Status) -> EventStatus {
        match status {
            Status::Draft => EventStatus::Draft,
            Status::Published => EventStatus::Published,
            Status::Canceled => EventStatus::Canceled,
        }
    }
}

/// What its owner says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Details {
    pub title: String,
    pub description: String,
    pub city: Name,
    pub category: Name,
    pub start_time: DateTime<Utc>,
    pub end_time: DateTime<Utc>,
    /// IANA.
    pub time_zone: String,
    /// 0 is unlimited.
    pub capacity: i32,
    pub cover_image_ids: Vec<String>,
}

/// A name as it was spelled, and as it is looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    pub spelled: String,
    pub folded: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub id: Uuid,
    pub owner_id: Uuid,
    pub details: Details,
    pub status: Status,
    pub active_participants: i32,
    pub count_version: i64,
    pub published_at: Option<DateTime<Utc>>,
    pub canceled_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// Grows with every change; a count is none.
    pub version: i64,
}

impl Event {
    pub fn draft(id: Uuid, owner_id: Uuid, details: Details, now: DateTime<Utc>) -> Event {
        Event {
            id,
            owner_id,
            details,
            status: Status::Draft,
            active_participants: 0,
            count_version: 0,
            published_at: None,
            canceled_at: None,
            created_at: now,
            updated_at: now,
            version: 1,
        }
    }

    /// Whether others than its owner may know of it: when it is published, or was when it was canceled.
    pub fn is_public(&self) -> bool {
        is_public(self.status, self.published_at)
    }

    /// The event with its next version.
    pub fn after(&self, action: Action, now: DateTime<Utc>) -> Result<Event, Refused> {
        let status = self.status.after(action)?;
        Ok(Event {
            status,
            published_at: match (action, self.status) {
                // The first time: who publishes again is not new, and not trending for it.
                (Action::Publish, _) => self.published_at.or(Some(now)),
                // What nobody could see when it was canceled stays so.
                (Action::Cancel, Status::Draft) => None,
                _ => self.published_at,
            },
            canceled_at: if action == Action::Cancel { Some(now) } else { self.canceled_at },
            updated_at: now,
            version: self.version + 1,
            ..self.clone()
        })
    }

    /// As other services hear of it.
    pub fn told(&self) -> EventChanged {
        EventChanged {
            event_id: self.id,
            version: self.version,
            status: self.status.into(),
            owner_id: self.owner_id,
            title: self.details.title.clone(),
            city: self.details.city.spelled.clone(),
            category: self.details.category.spelled.clone(),
            start_time: self.details.start_time,
            end_time: self.details.end_time,
            time_zone: self.details.time_zone.clone(),
            capacity: self.details.capacity,
            occurred_at: self.updated_at,
        }
    }
}

/// One line of an event's audit trail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusChange {
    pub version: i64,
    /// None: it was made.
    pub from: Option<Status>,
    pub to: Status,
    pub by: Uuid,
    pub at: DateTime<Utc>,
}

pub fn is_public(status: Status, published_at: Option<DateTime<Utc>>) -> bool {
    match status {
        Status::Draft => false,
        Status::Published => true,
        Status::Canceled => published_at.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_canceled_stays_so_and_nothing_happens_twice() {
        use Action::{Cancel, Publish, Unpublish, Update};
        use Status::{Canceled, Draft, Published};
        let legal = [
            (Draft, Update, Draft),
            (Draft, Publish, Published),
            (Draft, Cancel, Canceled),
            (Published, Update, Published),
            (Published, Unpublish, Draft),
            (Published, Cancel, Canceled),
        ];
        for from in Status::ALL {
            for action in [Update, Publish, Unpublish, Cancel] {
                let expected = legal.iter().find(|(a, b, _)| (*a, *b) == (from, action)).map(|(_, _, to)| *to);
                assert_eq!(from.after(action).ok(), expected, "{from} {action}");
            }
        }
    }
}
