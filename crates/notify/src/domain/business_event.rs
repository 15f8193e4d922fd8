//! Business events, and the notifications that follow from them.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use contracts::notify::EVENT_TYPE_CHARS_MAX;
use http_kit::problem::FieldError;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::delivery_rules::{Channel, Rules, UserSettings, plan};

/// The longest event id, and the longest key, in characters.
const ID_CHARS_MAX: usize = 255;
/// The longest aggregate type, in characters.
const AGGREGATE_TYPE_CHARS_MAX: usize = 50;

/// Something that people are notified of.
#[derive(Debug, Clone)]
pub(crate) struct BusinessEvent {
    pub(crate) id: Uuid,
    pub(crate) event_type: String,
    pub(crate) aggregate_type: Option<String>,
    pub(crate) aggregate_id: Option<i64>,
    pub(crate) payload: Box<RawValue>,
    pub(crate) at: DateTime<Utc>,
}

/// The columns of a [`BusinessEvent`]. If it no longer exists, all but the id are null.
#[derive(sqlx::FromRow)]
pub(crate) struct EventColumns {
    event_id: Uuid,
    event_type: Option<String>,
    aggregate_type: Option<String>,
    aggregate_id: Option<i64>,
    payload: Option<String>,
    at: Option<DateTime<Utc>>,
}

impl TryFrom<EventColumns> for Option<BusinessEvent> {
    type Error = serde_json::Error;

    fn try_from(columns: EventColumns) -> serde_json::Result<Option<BusinessEvent>> {
        let EventColumns { event_id: id, event_type, aggregate_type, aggregate_id, payload, at } = columns;
        let (Some(event_type), Some(payload), Some(at)) = (event_type, payload, at) else { return Ok(None) };
        let payload = RawValue::from_string(payload)?;
        Ok(Some(BusinessEvent { id, event_type, aggregate_type, aggregate_id, payload, at }))
    }
}

/// The type of the subject of notifications about registrations and about events of the events service.
const EVENT: &str = "event";

/// The subject of a notification: an aggregate of a producer, or an event of the events service. Clients open it by its id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = NotificationSubject)]
pub(crate) struct Subject {
    /// An aggregate type, or `event`.
    #[serde(rename = "type")]
    #[schema(example = "event")]
    pub(crate) kind: String,
    /// The number of the aggregate, or the id of the event.
    #[schema(example = "0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11")]
    pub(crate) id: String,
}

impl BusinessEvent {
    /// The subject of the event; None if it names none.
    pub(crate) fn subject(&self) -> Option<Subject> {
        /// Our own notifications name the event in their payload.
        #[derive(Deserialize)]
        struct EventPayload {
            event_id: Uuid,
        }
        let (kind, id) = match (&self.aggregate_type, self.aggregate_id) {
            (Some(kind), Some(id)) => (kind.clone(), id.to_string()),
            (None, None) => {
                let EventPayload { event_id } = serde_json::from_str(self.payload.get()).ok()?;
                (EVENT.to_owned(), event_id.to_string())
            }
            (Some(_), None) | (None, Some(_)) => return None,
        };
        Some(Subject { kind, id })
    }
}

/// One notification to be recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewNotification {
    pub(crate) event_id: Uuid,
    pub(crate) user_id: Uuid,
    pub(crate) channel: Channel,
    /// When it is to be delivered. None for a notification that is delivered by being recorded.
    pub(crate) due_at: Option<DateTime<Utc>>,
    /// The number in the inbox of the user; None for other channels.
    pub(crate) seq: Option<i64>,
    /// Why it is recorded but not delivered.
    pub(crate) skipped: Option<&'static str>,
}

/// The data that decides about the notifications of a batch of events.
pub(crate) struct Audience {
    pub(crate) default_rules: Rules,
    /// The rules of the event types that have their own.
    pub(crate) rules: HashMap<String, Rules>,
    /// The users who have settings.
    pub(crate) user_settings: HashMap<Uuid, UserSettings>,
    /// The users whose accounts are deleted.
    pub(crate) deleted: HashSet<Uuid>,
}

impl Audience {
    /// The notifications about one event: one for each recipient and wanted channel.
    pub(crate) fn expand<'a>(
        &'a self,
        event: &'a BusinessEvent,
        recipients: impl IntoIterator<Item = Uuid> + 'a,
        now: DateTime<Utc>,
    ) -> impl Iterator<Item = NewNotification> + 'a {
        let rules = self.rules.get(&event.event_type).unwrap_or(&self.default_rules);
        let undecided = UserSettings::default();
        // Most users have no settings, and then the answer is the same for all of them.
        let usual = plan(rules, &undecided, &event.event_type, now);
        let recipients = recipients.into_iter().filter(|user| !self.deleted.contains(user));
        recipients.flat_map(move |user_id| {
            let planned = match self.user_settings.get(&user_id) {
                Some(user_settings) => plan(rules, user_settings, &event.event_type, now),
                None => usual.clone(),
            };
            planned.into_iter().map(move |(channel, due_at)| NewNotification {
                event_id: event.id,
                user_id,
                channel,
                due_at: (channel != Channel::InApp).then(|| due_at.unwrap_or(now)),
                seq: None,
                skipped: None,
            })
        })
    }
}

/// Assigns the numbers in the inboxes. `last`: the highest number of each user after this batch.
pub(crate) fn assign_seq(notifications: &mut [NewNotification], last: &HashMap<Uuid, i64>) {
    let mut assigned: HashMap<Uuid, i64> = HashMap::new();
    for notification in notifications.iter_mut().rev().filter(|one| one.channel == Channel::InApp) {
        let from_end = assigned.entry(notification.user_id).or_default();
        notification.seq = last.get(&notification.user_id).map(|last| last - *from_end);
        *from_end += 1;
    }
}

/// Checks the parts of a business event that a producer chooses, as `pillarbox.notify` does.
pub(crate) fn check(event_type: &str, event_id: Option<&str>, key: Option<&str>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let is_word =
        |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if event_type.len() > EVENT_TYPE_CHARS_MAX || !event_type.split('.').all(is_word) {
        errors
            .push(FieldError::body("/event_type", "must be up to 187 letters, digits and _, in parts joined by dots"));
    } else if event_type.split('.').next().is_some_and(|word| word.eq_ignore_ascii_case("email")) {
        errors.push(FieldError::body("/event_type", "must not be email or begin with email., which requests e-mails"));
    }
    let is_visible =
        |id: &str| (1..=ID_CHARS_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    if !event_id.is_none_or(is_visible) {
        errors.push(FieldError::body("/event_id", "must have 1 to 255 visible ASCII characters; omit it for a new id"));
    }
    let fits = |key: &str| (1..=ID_CHARS_MAX).contains(&key.chars().count()) && !key.contains('\0');
    if !key.is_none_or(fits) {
        let detail = "must have 1 to 255 characters, without NUL; omit it for the order of the aggregate";
        errors.push(FieldError::body("/key", detail));
    }
    errors
}

/// Checks the name of a new aggregate type.
pub(crate) fn check_aggregate_type(name: &str) -> Result<(), &'static str> {
    let is_valid = name.len() <= AGGREGATE_TYPE_CHARS_MAX
        && name.bytes().next().is_some_and(|byte| byte.is_ascii_uppercase())
        && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
    if is_valid { Ok(()) } else { Err("must have 1 to 50 characters of A-Z, 0-9 and _, and start with a letter") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::delivery_rules::Preference;

    fn event(event_type: &str) -> BusinessEvent {
        BusinessEvent {
            id: Uuid::from_u128(7),
            event_type: event_type.to_owned(),
            aggregate_type: Some("RESTAURANT".to_owned()),
            aggregate_id: Some(5),
            payload: RawValue::NULL.to_owned(),
            at: DateTime::UNIX_EPOCH,
        }
    }

    fn users(count: u128) -> Vec<Uuid> {
        (1..=count).map(Uuid::from_u128).collect()
    }

    #[test]
    fn a_subject_is_the_aggregate_or_the_event_of_a_registration() {
        let subject = |kind: &str, id: &str| Some(Subject { kind: kind.to_owned(), id: id.to_owned() });
        let own = |payload: &str| {
            let payload = RawValue::from_string(payload.to_owned()).unwrap();
            BusinessEvent { aggregate_type: None, aggregate_id: None, payload, ..event("join.promoted") }
        };
        let id = "0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11";
        let of_aggregate = RawValue::from_string(format!(r#"{{"event_id": "{id}"}}"#)).unwrap();
        assert_eq!(BusinessEvent { payload: of_aggregate, ..event("A") }.subject(), subject("RESTAURANT", "5"));
        assert_eq!(own(&format!(r#"{{"event_id": "{id}", "title": "x"}}"#)).subject(), subject("event", id));
        for without in ["{}", "null", r#"{"event_id": 5}"#] {
            assert_eq!(own(without).subject(), None, "{without}");
        }
    }

    #[test]
    fn each_recipient_gets_the_wanted_channels_of_the_type_and_a_deleted_user_nothing() {
        let user = users(3);
        let muted = Preference { event_type: String::new(), channel: Some(Channel::Email), enabled: false };
        let in_app = Rules { critical: false, channels: vec![Channel::InApp], digest_minutes: 0 };
        let audience = Audience {
            default_rules: Rules::default_with(0),
            rules: HashMap::from([("ORDER_CREATED".to_owned(), in_app)]),
            user_settings: HashMap::from([(user[1], UserSettings { preferences: vec![muted], quiet: None })]),
            deleted: HashSet::from([user[2]]),
        };
        let now = DateTime::UNIX_EPOCH;
        let channels = |event_type: &str| -> Vec<(Uuid, Channel, bool)> {
            let event = event(event_type);
            let found = audience.expand(&event, user.clone(), now);
            found.map(|one| (one.user_id, one.channel, one.due_at.is_some())).collect()
        };
        let expected =
            [(user[0], Channel::Email, true), (user[0], Channel::InApp, false), (user[1], Channel::InApp, false)];
        assert_eq!(channels("RESERVATION_REQUESTED"), expected);
        assert_eq!(channels("ORDER_CREATED"), [(user[0], Channel::InApp, false), (user[1], Channel::InApp, false)]);
    }

    #[test]
    fn numbers_in_an_inbox_follow_the_order_of_the_batch() {
        let user = users(2);
        let one = |user_id: Uuid, channel: Channel| NewNotification {
            event_id: Uuid::nil(),
            user_id,
            channel,
            due_at: None,
            seq: None,
            skipped: None,
        };
        let (first, second) = (one(user[0], Channel::InApp), one(user[1], Channel::InApp));
        let mut batch = [first, one(user[0], Channel::Email), second, first, first];
        assign_seq(&mut batch, &HashMap::from([(user[0], 10), (user[1], 1)]));
        assert_eq!(batch.map(|one| one.seq), [Some(8), None, Some(1), Some(9), Some(10)]);
    }

    #[test]
    fn every_invalid_field_of_an_event_is_reported() {
        for event_type in ["RESERVATION_REQUESTED", "order.created", "emails.sent"] {
            assert_eq!(check(event_type, Some("evt-123-456"), Some("k")), []);
        }
        let pointers = |event_type: &str, id: &str, key: &str| -> Vec<String> {
            check(event_type, Some(id), Some(key)).into_iter().map(|error| error.pointer).collect()
        };
        assert_eq!(check(&"x".repeat(187), None, None), []);
        for bad in ["", "a b", "a..b", "é", "email", "EMAIL.x", &"x".repeat(188)] {
            assert_eq!(pointers(bad, "a", "k"), ["/event_type"], "{bad}");
        }
        assert_eq!(pointers("a", "a b", ""), ["/event_id", "/key"]);
        assert_eq!(pointers("a", &"x".repeat(256), "k"), ["/event_id"]);
    }

    #[test]
    fn an_aggregate_type_is_a_word_in_upper_case() {
        for good in ["A", "COURIER", "FLEET_2"] {
            assert_eq!(check_aggregate_type(good), Ok(()));
        }
        for bad in ["", "courier", "2ND", "_A", "A B", "É", &"A".repeat(51)] {
            assert!(check_aggregate_type(bad).is_err(), "{bad}");
        }
    }
}
