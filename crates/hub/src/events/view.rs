//! Events in API responses, with their outcome for each subscriber.

pub(crate) mod message;

use chrono::{DateTime, Utc};
use contracts::EventId;
use http_kit::problem::FieldError;
use pillarbox::log::Message as Logged;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::deliveries::domain::{EventOutcome, EventStatus, Outcome};
use crate::deliveries::message::{EVENT_SOURCE, EventSnapshot};
use crate::events::sql_events::SQL_SOURCE;
use crate::events::store::rejected::Rejection;
use crate::events::store::{Message, Progress, Skipped};
use crate::events::view::message::MessageId;

/// An event. Lists omit the payload.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubEvent)]
pub(crate) struct EventView {
    #[schema(value_type = String, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: EventId,
    #[schema(example = "order.paid")]
    event_type: String,
    /// The publisher: `hub` for events that were posted to the hub's API, `sql` for messages that were posted in SQL
    /// (`hub.sql_events`), the name of a service (`hub.export`), or `hub.system` for events of the hub itself.
    #[schema(example = "hub")]
    source: String,
    /// The ordering key with which the event was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    received_at: DateTime<Utc>,
    /// The payload as it was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

impl EventView {
    /// The view for lists, without the payload.
    pub(crate) fn summary(logged: Logged) -> EventView {
        EventView { payload: None, ..EventView::with_payload(logged) }
    }

    /// A rejected event, without its payload.
    pub(crate) fn of_rejection(rejection: &Rejection, ordering_key: Option<String>) -> EventView {
        EventView {
            event_id: EventId(rejection.message_id),
            event_type: rejection.event_type.clone(),
            source: SQL_SOURCE.as_str().to_owned(),
            ordering_key,
            received_at: rejection.log_ref.at,
            payload: None,
        }
    }

    /// The event of a dead letter, as it was when the message was given up.
    pub(crate) fn of_snapshot(snapshot: EventSnapshot, ordering_key: Option<String>) -> EventView {
        EventView {
            event_id: EventId(snapshot.event_id),
            event_type: snapshot.event_type,
            source: snapshot.source,
            ordering_key,
            received_at: snapshot.created_at,
            payload: Some(snapshot.payload),
        }
    }

    /// The view of a single event.
    ///
    /// The payload of a confidential message is not shown, except to the tenant that has posted it to the hub itself.
    pub(crate) fn with_payload(logged: Logged) -> EventView {
        let is_own = logged.source == EVENT_SOURCE.as_str();
        let payload = if is_own { logged.payload.clone() } else { logged.shown_payload() };
        EventView {
            event_id: EventId(logged.message_id),
            event_type: logged.topic,
            source: logged.source,
            ordering_key: logged.key,
            received_at: logged.at,
            payload: Some(payload),
        }
    }
}

/// The event of a message or dead letter, without its payload.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubEventReference)]
pub(crate) struct EventReference {
    /// Absent, like `event_type` and `ordering_key`, if the retention of the event has expired.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: Option<EventId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "order.paid")]
    event_type: Option<String>,
    /// The ordering key with which the event was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    /// When the event was posted.
    received_at: DateTime<Utc>,
}

impl EventReference {
    /// `event` is the event's id and type. None: the log no longer has them.
    pub(crate) fn new(
        event: Option<(Uuid, String)>,
        ordering_key: Option<String>,
        received_at: DateTime<Utc>,
    ) -> EventReference {
        let (id, event_type) = event.unzip();
        EventReference { event_id: id.map(EventId), event_type, ordering_key, received_at }
    }
}

/// An event in a list.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubListedEvent)]
pub(crate) struct ListedEvent {
    #[serde(flatten)]
    pub(crate) event: EventView,
    pub(crate) outcome: EventOutcome,
    /// Why the event is not sent; in a list of rejected events only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rejection: Option<RejectionView>,
}

/// Why an event that was posted in SQL is not sent.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubRejection)]
pub(crate) struct RejectionView {
    /// The version of the event type that refuses the payload. Absent: the reason is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<i32>,
    /// What is wrong, with pointers into the event.
    errors: Vec<FieldError>,
    rejected_at: DateTime<Utc>,
}

impl From<Rejection> for RejectionView {
    fn from(rejection: Rejection) -> RejectionView {
        RejectionView { version: rejection.version, errors: rejection.errors, rejected_at: rejection.rejected_at }
    }
}

/// An event and its outcome for each subscriber.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubEventWithOutcomes)]
pub(crate) struct EventWithOutcomes {
    #[serde(flatten)]
    pub(crate) event: EventView,
    /// How far the event is. An event that matches no subscriber is completed.
    pub(crate) status: EventStatus,
    pub(crate) outcome: EventOutcome,
    /// Why the event is not sent, if it is rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rejection: Option<RejectionView>,
    /// One outcome for each subscriber whose `event_types` match the event.
    pub(crate) outcomes: Vec<OutcomeView>,
}

/// The outcome of an event for one subscriber.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubOutcome)]
pub(crate) struct OutcomeView {
    pub(crate) subscriber_id: Uuid,
    /// The subscriber's name.
    name: String,
    /// Absent if the event was not sent to this subscriber (`filtered`, `inactive`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    message_id: Option<MessageId>,
    #[serde(flatten)]
    progress: ProgressView,
}

/// The state of a delivery.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DeliveryProgress)]
pub(crate) struct ProgressView {
    outcome: Outcome,
    /// The number of attempts so far, including those before the message was retried as a dead letter. A replay counts anew.
    attempts: i16,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_attempt_at: Option<DateTime<Utc>>,
    /// The HTTP status of the last attempt. Absent: there was no response.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_status: Option<i16>,
    /// The kind of failure of the last attempt: `status`, or why there was no response.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    /// When the next retry is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_attempt_at: Option<DateTime<Utc>>,
    /// The message is a dead letter, and later messages of its lane wait until it is retried or given up.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    blocks_lane: bool,
    /// The dead letter that can be retried or discarded. Absent: the message was not given up, or its dead letter was retried
    /// or discarded.
    #[serde(skip_serializing_if = "Option::is_none")]
    dead_letter_id: Option<Uuid>,
}

impl From<Progress> for ProgressView {
    fn from(progress: Progress) -> ProgressView {
        let last_error = match (progress.last_status, progress.last_error, progress.last_detail) {
            // The same text that a dead letter of this message would have.
            (Some(status), Some(_), None) => Some(format!("answered {status}")),
            (_, Some(error), Some(detail)) => Some(format!("{error}: {detail}")),
            (_, error, detail) => error.or(detail),
        };
        ProgressView {
            outcome: progress.outcome,
            attempts: progress.attempts,
            last_attempt_at: progress.last_attempt_at,
            last_status: progress.last_status,
            last_error,
            next_attempt_at: progress.next_attempt_at,
            blocks_lane: progress.blocks_lane,
            dead_letter_id: progress.open_dead_letter,
        }
    }
}

impl OutcomeView {
    pub(crate) fn outcome(&self) -> Outcome {
        self.progress.outcome
    }

    /// The outcome of a message that was sent, or is still to be sent.
    pub(crate) fn of_message(event: Uuid, message: Message) -> OutcomeView {
        OutcomeView {
            subscriber_id: message.subscriber,
            name: message.name,
            message_id: Some(MessageId { event, subscriber: message.subscriber }),
            progress: message.progress.into(),
        }
    }
}

impl From<Skipped> for OutcomeView {
    fn from(skipped: Skipped) -> OutcomeView {
        let progress = ProgressView {
            outcome: skipped.outcome,
            attempts: 0,
            last_attempt_at: None,
            last_status: None,
            last_error: None,
            next_attempt_at: None,
            blocks_lane: false,
            dead_letter_id: None,
        };
        OutcomeView { subscriber_id: skipped.subscriber, name: skipped.name, message_id: None, progress }
    }
}

/// The result of retrying many rejected events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RetriedEvents {
    /// The number of events that are accepted now and are sent.
    pub(crate) retried: u64,
    /// The number of events that are still refused; each shows why.
    pub(crate) refused: u64,
    /// Whether later rejected events remain: repeat the request with `next_after` as `after`.
    pub(crate) more: bool,
    /// Where the next request continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_after: Option<i64>,
}
