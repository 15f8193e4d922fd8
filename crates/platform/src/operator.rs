//! The operator's way in: the log, its consumers, and what went wrong.
//!
//! Owns no table: what it shows and mends is the mailbox's. Only operators come in, by HTTP ([`http`]) or by command; both
//! go through [`flow`]. Nothing here does a consumer's work: an operator says what is to be done (a parked message is due,
//! a dead letter is parked again, a replay is asked for), and the owner of the shard does it.

pub(crate) mod flow;
pub(crate) mod http;

use chrono::{DateTime, Utc};
use contracts::EventId;
use kit::problem::{FieldError, Problem};
use mailbox::dead_letter::DeadLetter;
use mailbox::log::Message;
use mailbox::parked::ParkedMessage;
use mailbox::post::AggregateId;
use mailbox::status::MessageStatus;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

/// A message as people see it. Lists leave out its headers and its payload.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageView {
    /// Its place in the log.
    log_id: i64,
    #[schema(value_type = String, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: EventId,
    at: DateTime<Utc>,
    /// Who posted it.
    #[schema(example = "sql")]
    source: String,
    tenant: String,
    #[schema(example = "order.created")]
    topic: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<String>,
    /// A number or a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    aggregate_id: Option<AggregateId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    headers: Option<Box<RawValue>>,
    /// As it was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

/// A message, and what each consumer that it is for has made of it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageWithOutcomes {
    #[serde(flatten)]
    message: MessageView,
    consumers: Vec<MessageStatus>,
}

/// A message that a consumer could not take, or that waits behind one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ParkedView {
    /// Its name for `retry` and `discard`.
    pub(crate) place: i64,
    #[schema(example = "relay.email")]
    pub(crate) consumer: String,
    pub(crate) attempts: i32,
    /// When it is tried again. Absent: it waits behind an earlier one of its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_error: Option<String>,
    pub(crate) parked_at: DateTime<Utc>,
    /// It was thrown away, and its owner has not yet passed it.
    pub(crate) discarded: bool,
    pub(crate) message: MessageView,
}

/// A message that was given up.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeadLetterView {
    pub(crate) id: i64,
    #[schema(example = "relay.email")]
    pub(crate) consumer: String,
    pub(crate) attempts: i32,
    pub(crate) last_error: String,
    pub(crate) died_at: DateTime<Utc>,
    pub(crate) message: MessageView,
}

impl MessageView {
    pub(crate) fn whole(message: Message) -> MessageView {
        let (headers, payload) = (Some(message.headers.clone()), Some(message.payload.clone()));
        MessageView { headers, payload, ..MessageView::brief(message) }
    }

    pub(crate) fn brief(message: Message) -> MessageView {
        MessageView {
            log_id: message.id,
            event_id: EventId(message.message_id),
            at: message.at,
            source: message.source,
            tenant: message.tenant,
            topic: message.topic,
            key: message.key,
            aggregate_type: message.aggregate_type,
            aggregate_id: message.aggregate_id,
            headers: None,
            payload: None,
        }
    }

    pub(crate) fn topic(&self) -> &str {
        &self.topic
    }

    pub(crate) fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    pub(crate) fn event_id(&self) -> EventId {
        self.event_id
    }
}

impl From<ParkedMessage> for ParkedView {
    fn from(parked: ParkedMessage) -> ParkedView {
        ParkedView {
            place: parked.place,
            consumer: parked.consumer,
            attempts: parked.attempts,
            next_at: parked.next_at,
            last_error: parked.last_error,
            parked_at: parked.parked_at,
            discarded: parked.discarded,
            message: MessageView::brief(parked.message),
        }
    }
}

impl DeadLetterView {
    pub(crate) fn whole(dead: DeadLetter) -> DeadLetterView {
        DeadLetterView::with(dead, MessageView::whole)
    }

    pub(crate) fn brief(dead: DeadLetter) -> DeadLetterView {
        DeadLetterView::with(dead, MessageView::brief)
    }

    fn with(dead: DeadLetter, view: fn(Message) -> MessageView) -> DeadLetterView {
        DeadLetterView {
            id: dead.id,
            consumer: dead.consumer,
            attempts: dead.attempts,
            last_error: dead.last_error,
            died_at: dead.died_at,
            message: view(dead.message),
        }
    }
}

/// A message's id as people have it at hand: `evt_` and a UUID, or the UUID alone.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct MessageName(pub(crate) Uuid);

impl TryFrom<String> for MessageName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<MessageName, &'static str> {
        let uuid = text.strip_prefix("evt_").unwrap_or(&text);
        uuid.parse().map(MessageName).map_err(|_| "takes evt_ and a UUID, or the UUID alone")
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the log has no such message: it is not kept any more, or was never posted; dead letters keep theirs")]
    NoMessage,
    #[error("there is no consumer of this name; `pillarbox cursors` lists them")]
    NoConsumer,
    #[error(
        "somebody works for {0}, and it would be back at once: stop its processes or take it out of the settings, then drop it"
    )]
    ConsumerInUse(String),
    #[error("nothing is parked at this place any more; `pillarbox parked list` shows what is")]
    NotParked,
    #[error("an earlier message of its key is parked at place {0}, and is to be tried or discarded first")]
    ParkedBehind(i64),
    #[error("there is no such dead letter any more; `pillarbox dead-letters list` shows what there is")]
    NoDeadLetter,
    #[error("its consumer {0} is not there to take it again; it can be discarded")]
    ConsumerGone(String),
    #[error("there is no such replay; `pillarbox replay list` shows what there is")]
    NoReplay,
    #[error("name at least one filter, or say `all: true`")]
    NoFilter,
    #[error("say `all: true` alone, or filters")]
    AllAndFilters,
    #[error("takes a time that is past")]
    FromInTheFuture,
    #[error("takes a time after `from`")]
    ToNotAfterFrom,
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        let field = |pointer: &str| Problem::validation(vec![FieldError::body(pointer, &error)]);
        match &error {
            Error::NoMessage => Problem::not_found("message-not-found", &error),
            Error::NoConsumer => Problem::not_found("consumer-not-found", &error),
            Error::ConsumerInUse(_) => Problem::conflict("consumer-in-use", &error),
            Error::NotParked => Problem::not_found("parked-not-found", &error),
            Error::ParkedBehind(_) => Problem::conflict("parked-behind", &error),
            Error::NoDeadLetter => Problem::not_found("dead-letter-not-found", &error),
            Error::ConsumerGone(_) => Problem::conflict("consumer-gone", &error),
            Error::NoReplay => Problem::not_found("replay-not-found", &error),
            Error::NoFilter => field(""),
            Error::AllAndFilters => field("/all"),
            Error::FromInTheFuture => field("/from"),
            Error::ToNotAfterFrom => field("/to"),
            Error::Database(cause) => mailbox::database::problem(cause),
        }
    }
}
