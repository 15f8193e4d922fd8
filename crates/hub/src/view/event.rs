use chrono::{DateTime, Utc};
use contracts::EventId;
use mailbox::log::Message as Logged;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::Outcome;
use crate::store::message::{Message, Progress, Unsent};
use crate::view::MessageId;

/// Lists leave out the payload.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubEvent)]
pub(crate) struct EventView {
    #[schema(value_type = String, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: EventId,
    #[schema(example = "order.paid")]
    event_type: String,
    /// Who says it: `hub` if it was posted here, or a service (`hub.export`).
    #[schema(example = "hub")]
    source: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    received_at: DateTime<Utc>,
    /// As it was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

impl EventView {
    pub(crate) fn brief(logged: Logged) -> EventView {
        EventView { payload: None, ..EventView::whole(logged) }
    }

    pub(crate) fn whole(logged: Logged) -> EventView {
        EventView {
            event_id: EventId(logged.message_id),
            event_type: logged.topic,
            source: logged.source,
            ordering_key: logged.key,
            received_at: logged.at,
            payload: Some(logged.payload),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubEventWithOutcomes)]
pub(crate) struct EventWithOutcomes {
    #[serde(flatten)]
    pub(crate) event: EventView,
    /// One for each subscriber that asked for its type.
    pub(crate) outcomes: Vec<OutcomeView>,
}

/// What became of an event for one subscriber.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubOutcome)]
pub(crate) struct OutcomeView {
    pub(crate) subscriber_id: Uuid,
    name: String,
    /// Absent if there was nothing to send.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    message_id: Option<MessageId>,
    #[serde(flatten)]
    progress: ProgressView,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProgressView {
    outcome: Outcome,
    attempts: i16,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_attempt_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_status: Option<i16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_attempt_at: Option<DateTime<Utc>>,
    /// It died, and those behind it wait until it is retried or given up.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    blocks_lane: bool,
}

impl From<Progress> for ProgressView {
    fn from(progress: Progress) -> ProgressView {
        let Progress { outcome, attempts, last_attempt_at, last_status, last_error, next_attempt_at, blocks_lane } =
            progress;
        ProgressView { outcome, attempts, last_attempt_at, last_status, last_error, next_attempt_at, blocks_lane }
    }
}

impl OutcomeView {
    pub(crate) fn sent(event: Uuid, message: Message) -> OutcomeView {
        OutcomeView {
            subscriber_id: message.subscriber,
            name: message.name,
            message_id: Some(MessageId { event, subscriber: message.subscriber }),
            progress: message.progress.into(),
        }
    }
}

impl From<Unsent> for OutcomeView {
    fn from(unsent: Unsent) -> OutcomeView {
        let progress = ProgressView {
            outcome: unsent.outcome,
            attempts: 0,
            last_attempt_at: None,
            last_status: None,
            last_error: None,
            next_attempt_at: None,
            blocks_lane: false,
        };
        OutcomeView { subscriber_id: unsent.subscriber, name: unsent.name, message_id: None, progress }
    }
}
