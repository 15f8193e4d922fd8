//! The subjects of notifications: a user's registrations, and changes of the events that the user has joined.

use chrono::{DateTime, Utc};
use contracts::events::{EventChanged, EventStatus};
use contracts::joins::{self, JoinChanged, JoinStatus};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::policy::Cause;

/// An event of the events service, as far as texts name it.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct JoinableEvent {
    pub(crate) event_id: Uuid,
    pub(crate) version: i64,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: EventStatus,
    /// The organizer.
    pub(crate) owner_id: Uuid,
    pub(crate) title: String,
    pub(crate) city: String,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
    /// IANA name.
    pub(crate) time_zone: String,
    /// The message that canceled the event.
    pub(crate) canceled_by: Option<Uuid>,
    /// Why it was canceled, if a reason was given.
    pub(crate) reason: Option<String>,
}

/// Whether a user takes part in an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub(crate) enum Participation {
    Active,
    Waitlisted,
    /// Not any more.
    Left,
}

/// Whether a user takes part in an event, in one version of its registrations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) event_id: Uuid,
    pub(crate) user_id: Uuid,
    pub(crate) status: Participation,
    /// The version of the counts of the event: a message with a lower one is late.
    pub(crate) version: i64,
}

/// The people who are notified of a business event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Addressees {
    /// Those who have joined this event.
    Participants(Uuid),
    Recipients {
        aggregate_type: String,
        aggregate_id: i64,
    },
}

/// The columns of [`Addressees`]: the event, or both of the others.
#[derive(sqlx::FromRow)]
pub(crate) struct AddresseesColumns {
    event_id: Option<Uuid>,
    aggregate_type: Option<String>,
    aggregate_id: Option<i64>,
}

impl From<AddresseesColumns> for Addressees {
    fn from(columns: AddresseesColumns) -> Addressees {
        let AddresseesColumns { event_id, aggregate_type, aggregate_id } = columns;
        match (aggregate_type, aggregate_id) {
            (Some(aggregate_type), Some(aggregate_id)) => Addressees::Recipients { aggregate_type, aggregate_id },
            _ => Addressees::Participants(event_id.unwrap_or_default()),
        }
    }
}

/// The meaning of a message about a registration for the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fact {
    /// The user is notified of the message itself.
    Registration,
    /// The registration ended because the event was canceled: the user is notified of that, once.
    Canceled { by: Uuid },
    /// The registration ended for a reason that is not known yet: the message about the event has still to arrive.
    Unexplained,
}

/// The payload of a notification about an event that is not known: its text names no event.
#[derive(Debug, Serialize)]
pub(crate) struct UnknownEventFacts<'a> {
    pub(crate) event_id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expires_at: Option<DateTime<Utc>>,
}

/// The payload of all notifications about events.
#[derive(Debug, Serialize)]
pub(crate) struct EventFacts<'a> {
    pub(crate) event_id: Uuid,
    pub(crate) title: &'a str,
    pub(crate) city: &'a str,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
    pub(crate) time_zone: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<&'a str>,
    /// The end of a ban.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expires_at: Option<DateTime<Utc>>,
    /// The place and the times before a change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) previous: Option<Previous>,
}

/// The city and the times that participants knew before a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Previous {
    pub(crate) city: String,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) end_time: DateTime<Utc>,
}

impl JoinableEvent {
    /// The event after a change; None if a newer one is known. `message_id`: the message about the change.
    pub(crate) fn after(
        known: Option<&JoinableEvent>,
        change: &EventChanged,
        message_id: Uuid,
    ) -> Option<JoinableEvent> {
        if known.is_some_and(|known| known.version >= change.version) {
            return None;
        }
        let is_canceled = change.status == EventStatus::Canceled;
        Some(JoinableEvent {
            event_id: change.event_id,
            version: change.version,
            status: change.status,
            owner_id: change.owner_id,
            title: change.title.clone(),
            city: change.city.clone(),
            start_time: change.start_time,
            end_time: change.end_time,
            time_zone: change.time_zone.clone(),
            canceled_by: known.and_then(|known| known.canceled_by).or(is_canceled.then_some(message_id)),
            reason: change.reason.clone().or(known.and_then(|known| known.reason.clone())).filter(|_| is_canceled),
        })
    }

    /// Whether participants are notified that this event differs from the state that they know.
    pub(crate) fn moves(&self, known: &JoinableEvent) -> bool {
        self.status == EventStatus::Published && self.location_and_time() != known.location_and_time()
    }

    pub(crate) fn facts(&self) -> EventFacts<'_> {
        EventFacts {
            event_id: self.event_id,
            title: &self.title,
            city: &self.city,
            start_time: self.start_time,
            end_time: self.end_time,
            time_zone: &self.time_zone,
            reason: self.reason.as_deref(),
            expires_at: None,
            previous: None,
        }
    }

    pub(crate) fn location_and_time(&self) -> Previous {
        Previous { city: self.city.clone(), start_time: self.start_time, end_time: self.end_time }
    }

    /// Who causes the notifications about it.
    pub(crate) fn organizer(&self) -> Cause {
        Cause::Organizer { organizer: self.owner_id, event_id: self.event_id }
    }

    /// The meaning of a message about a registration. Joins expires all registrations of a canceled event, and the waitlist of one
    /// that has ended, and posts the same message for both.
    pub(crate) fn fact(&self, topic: &str, change: &JoinChanged) -> Fact {
        match self.canceled_by {
            _ if topic != joins::EXPIRED => Fact::Registration,
            Some(by) => Fact::Canceled { by },
            None if change.occurred_at >= self.end_time => Fact::Registration,
            None => Fact::Unexplained,
        }
    }
}

/// Whether the user is notified of this message. A ban of a user who neither has a seat nor waits for one ends nothing: an organizer
/// must not reach people who never joined, nor a person more often than the person joins.
pub(crate) fn concerns_user(topic: &str, change: &JoinChanged) -> bool {
    let had_joined = matches!(change.previous_status, Some(JoinStatus::Active | JoinStatus::Waitlisted));
    topic != joins::BANNED || had_joined
}

/// Whether the organizer has caused this message, not the user.
pub(crate) fn is_moderation(topic: &str) -> bool {
    [joins::KICKED, joins::BANNED].contains(&topic)
}

impl Registration {
    /// The registration after a message.
    pub(crate) fn after(topic: &str, change: &JoinChanged) -> Registration {
        let status = match topic {
            joins::CONFIRMED | joins::PROMOTED => Participation::Active,
            joins::WAITLISTED => Participation::Waitlisted,
            _ => Participation::Left,
        };
        Registration { event_id: change.event_id, user_id: change.user_id, status, version: change.counts.version }
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use contracts::joins::Count;

    use super::*;

    fn change(version: i64, status: EventStatus) -> EventChanged {
        EventChanged {
            event_id: Uuid::from_u128(1),
            version,
            status,
            owner_id: Uuid::nil(),
            title: "Chess".to_owned(),
            city: "Lisbon".to_owned(),
            category: "games".to_owned(),
            start_time: DateTime::UNIX_EPOCH,
            end_time: DateTime::UNIX_EPOCH + TimeDelta::hours(2),
            time_zone: "Europe/Lisbon".to_owned(),
            capacity: 1,
            reason: None,
            by: None,
            occurred_at: DateTime::UNIX_EPOCH,
        }
    }

    fn expired(at: DateTime<Utc>) -> JoinChanged {
        JoinChanged {
            event_id: Uuid::from_u128(1),
            user_id: Uuid::from_u128(2),
            join_id: None,
            status: None,
            previous_status: None,
            seq: None,
            reason: None,
            by: None,
            expires_at: None,
            counts: Count { active: 0, waitlisted: 0, version: 1 },
            occurred_at: at,
            trace_id: String::new(),
        }
    }

    #[test]
    fn only_a_newer_change_counts_and_only_another_time_or_city_is_announced() {
        let message = Uuid::from_u128(9);
        let known = JoinableEvent::after(None, &change(2, EventStatus::Published), message).unwrap();
        for version in [1, 2] {
            assert_eq!(JoinableEvent::after(Some(&known), &change(version, EventStatus::Canceled), message), None);
        }
        let changed = |edit: fn(&mut EventChanged)| {
            let mut change = change(3, EventStatus::Published);
            edit(&mut change);
            JoinableEvent::after(Some(&known), &change, message).unwrap().moves(&known)
        };
        assert!(changed(|change| change.city = "Porto".to_owned()));
        assert!(changed(|change| change.start_time += TimeDelta::hours(1)));
        assert!(changed(|change| change.end_time += TimeDelta::hours(1)));
        assert!(!changed(|change| change.title = "Go".to_owned()));
        assert!(!changed(|change| {
            change.status = EventStatus::Draft;
            change.city = "Porto".to_owned();
        }));
    }

    #[test]
    fn an_expired_registration_is_explained_by_the_cancellation_or_the_end_of_its_event() {
        let (first, second) = (Uuid::from_u128(8), Uuid::from_u128(9));
        let published = JoinableEvent::after(None, &change(1, EventStatus::Published), first).unwrap();
        let during = expired(DateTime::UNIX_EPOCH);
        assert_eq!(published.fact(joins::EXPIRED, &during), Fact::Unexplained);
        assert_eq!(published.fact(joins::EXPIRED, &expired(published.end_time)), Fact::Registration);
        assert_eq!(published.fact(joins::CANCELED, &during), Fact::Registration);
        let canceled = JoinableEvent::after(Some(&published), &change(2, EventStatus::Canceled), first).unwrap();
        assert_eq!(canceled.fact(joins::EXPIRED, &during), Fact::Canceled { by: first });
        let restated = JoinableEvent::after(Some(&canceled), &change(3, EventStatus::Canceled), second).unwrap();
        assert_eq!(restated.canceled_by, Some(first), "the same cancellation, one notification");
    }
}
