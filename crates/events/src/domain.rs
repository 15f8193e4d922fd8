//! An event, its statuses and the legal transitions between them.

use chrono::{DateTime, Utc};
use contracts::events::{EventChanged, EventStatus};
use http_kit::auth::{Caller, Principal};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[schema(as = GatheringStatus)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub(crate) enum Status {
    /// Visible to its owner and to admins.
    Draft,
    Published,
    /// Final.
    Canceled,
}

/// A requested change. The text form completes the sentence of [`Refused`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub(crate) enum Action {
    #[strum(serialize = "changed")]
    Update,
    #[strum(serialize = "published")]
    Publish,
    #[strum(serialize = "unpublished")]
    Unpublish,
    #[strum(serialize = "canceled")]
    Cancel,
    #[strum(serialize = "handed over")]
    HandOver,
}

/// The reason why an event does not allow an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("an event that is {from} cannot be {action}")]
    Transition { from: Status, action: Action },
    #[error("an event that has ended cannot be published: it ended at {0}; change its end_time first")]
    Ended(DateTime<Utc>),
}

/// Who requests a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Actor {
    pub(crate) principal: Principal,
    /// An admin of the installation, who moderates the events of all users.
    pub(crate) is_admin: bool,
}

impl From<&Caller> for Actor {
    fn from(caller: &Caller) -> Actor {
        Actor { principal: caller.principal, is_admin: caller.is_operator() }
    }
}

impl Actor {
    pub(crate) fn owns(&self, event: &Event) -> bool {
        self.principal == Principal::User(event.owner_id)
    }

    /// Whether the actor may see the event.
    pub(crate) fn sees(&self, event: &Event) -> bool {
        event.is_public() || self.is_admin || self.owns(event)
    }

    /// Whether the actor may do this with the event: the owner may do everything, an admin may withdraw it or offer it to
    /// another owner.
    pub(crate) fn may(&self, action: Action, event: &Event) -> bool {
        match action {
            Action::Update | Action::Publish => self.owns(event),
            Action::Unpublish | Action::Cancel | Action::HandOver => self.is_admin || self.owns(event),
        }
    }
}

impl Status {
    /// The status after an action. Every transition that is not listed is refused.
    pub(crate) fn after(self, action: Action) -> Result<Status, Refused> {
        match (self, action) {
            (Status::Draft | Status::Published, Action::Update | Action::HandOver) => Ok(self),
            (Status::Draft, Action::Publish) => Ok(Status::Published),
            (Status::Published, Action::Unpublish) => Ok(Status::Draft),
            (Status::Draft | Status::Published, Action::Cancel) => Ok(Status::Canceled),
            (from, action) => Err(Refused::Transition { from, action }),
        }
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

/// The fields that the owner sets.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Details {
    pub(crate) title: String,
    pub(crate) description: String,
    #[sqlx(flatten, try_from = "CityColumns")]
    pub(crate) city: Name,
    #[sqlx(flatten, try_from = "CategoryColumns")]
    pub(crate) category: Name,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
    /// IANA name.
    pub(crate) time_zone: String,
    /// 0 means unlimited.
    pub(crate) capacity: i32,
    pub(crate) cover_image_ids: Vec<String>,
}

/// A name as the owner spelled it, and its normalized form for comparisons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) spelled: String,
    pub(crate) normalized: String,
}

#[derive(sqlx::FromRow)]
struct CityColumns {
    city: String,
    city_norm: String,
}

impl From<CityColumns> for Name {
    fn from(CityColumns { city, city_norm }: CityColumns) -> Name {
        Name { spelled: city, normalized: city_norm }
    }
}

#[derive(sqlx::FromRow)]
struct CategoryColumns {
    category: String,
    category_norm: String,
}

impl From<CategoryColumns> for Name {
    fn from(CategoryColumns { category, category_norm }: CategoryColumns) -> Name {
        Name { spelled: category, normalized: category_norm }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Event {
    pub(crate) id: Uuid,
    pub(crate) owner_id: Uuid,
    #[sqlx(flatten)]
    pub(crate) details: Details,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: Status,
    pub(crate) active_participants: i32,
    pub(crate) count_version: i64,
    pub(crate) published_at: Option<DateTime<Utc>>,
    pub(crate) canceled_at: Option<DateTime<Utc>>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
    /// Increases with every change of the event. A new participant count does not change it.
    pub(crate) version: i64,
}

impl Event {
    pub(crate) fn draft(id: Uuid, owner_id: Uuid, details: Details, now: DateTime<Utc>) -> Event {
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

    /// Whether users other than the owner and admins may see it: it is published, or was published when it was canceled.
    pub(crate) fn is_public(&self) -> bool {
        is_public(self.status, self.published_at)
    }

    /// The event after an action, with the next version. Fails if the status does not allow the action, or if the event has
    /// ended and would be published.
    pub(crate) fn after(&self, action: Action, now: DateTime<Utc>) -> Result<Event, Refused> {
        let status = self.status.after(action)?;
        if action == Action::Publish && self.details.end_time <= now {
            return Err(Refused::Ended(self.details.end_time));
        }
        Ok(Event {
            status,
            published_at: match (action, self.status) {
                // The time of the first publication: publishing again must not make the event trend as new.
                (Action::Publish, _) => self.published_at.or(Some(now)),
                // An event that was not visible when it was canceled stays hidden.
                (Action::Cancel, Status::Draft) => None,
                _ => self.published_at,
            },
            canceled_at: if action == Action::Cancel { Some(now) } else { self.canceled_at },
            updated_at: now,
            version: self.version + 1,
            ..self.clone()
        })
    }

    /// The payload of the messages about the event.
    pub(crate) fn to_message(&self) -> EventChanged {
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
            reason: None,
            by: None,
            occurred_at: self.updated_at,
        }
    }
}

/// One entry of an event's status history.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct StatusChange {
    pub(crate) event_id: Uuid,
    pub(crate) version: i64,
    /// None for the creation of the event.
    #[sqlx(rename = "from_status", try_from = "NullableText<'a>")]
    pub(crate) from: Option<Status>,
    #[sqlx(rename = "to_status", try_from = "&'a str")]
    pub(crate) to: Status,
    #[sqlx(flatten, try_from = "PrincipalColumns")]
    pub(crate) by: Principal,
    pub(crate) reason: Option<String>,
    pub(crate) at: DateTime<Utc>,
}

/// A text column that can be null.
#[derive(sqlx::Type)]
#[sqlx(transparent)]
struct NullableText<'a>(Option<&'a str>);

impl TryFrom<NullableText<'_>> for Option<Status> {
    type Error = strum::ParseError;

    fn try_from(text: NullableText<'_>) -> Result<Option<Status>, strum::ParseError> {
        text.0.map(str::parse).transpose()
    }
}

#[derive(sqlx::FromRow)]
struct PrincipalColumns {
    changed_by: Uuid,
    by_key: bool,
}

impl From<PrincipalColumns> for Principal {
    fn from(columns: PrincipalColumns) -> Principal {
        let id = columns.changed_by;
        if columns.by_key { Principal::Key(id) } else { Principal::User(id) }
    }
}

pub(crate) fn is_public(status: Status, published_at: Option<DateTime<Utc>>) -> bool {
    match status {
        Status::Draft => false,
        Status::Published => true,
        Status::Canceled => published_at.is_some(),
    }
}

/// The options of a run of the reconciliation with the joins service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReconcileOptions {
    /// Report differences without repairing them.
    pub dry_run: bool,
    /// Trust no version: restate every event under a new version. Needed after a database was restored from a backup.
    pub force: bool,
}

/// The progress of a run of the reconciliation.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Progress {
    /// The number of parts; None until all of them are posted.
    pub parts: Option<i32>,
    pub answered: i32,
    pub checked: i32,
    /// The number of wrong counts in the events service, and how many of them are being repaired.
    pub drifted: i32,
    pub repaired: i32,
    /// The number of events that are outdated or miscounted in the joins service, and how many of them are being
    /// repaired.
    pub joins_drifted: i32,
    pub joins_repaired: i32,
    pub finished_at: Option<DateTime<Utc>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_canceled_event_is_final_and_no_transition_repeats() {
        use Action::{Cancel, HandOver, Publish, Unpublish, Update};
        use Status::{Canceled, Draft, Published};
        let legal = [
            (Draft, Update, Draft),
            (Draft, Publish, Published),
            (Draft, Cancel, Canceled),
            (Draft, HandOver, Draft),
            (Published, HandOver, Published),
            (Published, Update, Published),
            (Published, Unpublish, Draft),
            (Published, Cancel, Canceled),
        ];
        for from in [Draft, Published, Canceled] {
            for action in [Update, Publish, Unpublish, Cancel, HandOver] {
                let expected = legal.iter().find(|(a, b, _)| (*a, *b) == (from, action)).map(|(_, _, to)| *to);
                assert_eq!(from.after(action).ok(), expected, "{from} {action}");
            }
        }
    }
}
