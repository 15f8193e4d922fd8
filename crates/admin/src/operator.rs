//! The operator API: the log, its consumers, parked messages, dead letters and replays.
//!
//! This module owns no table; it reads and changes the tables of the library. Operators use it over HTTP ([`http`]); the commands
//! `status` and `recover`, which also work while no server runs, use it directly. Changes go through [`flow`]; lists are read
//! from the library. It never does a consumer's work: it records what the operator
//! wants (a parked message is due, a dead letter is parked again, a replay is requested), and the shard worker that owns the
//! shard does it.

mod consumers;
mod filters;
pub mod flow;
pub(crate) mod http;

use chrono::{DateTime, Utc};
use contracts::EventId;
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::{AggregateId, Message};
use pillarbox::operations::dead_letters::DeadLetter;
use pillarbox::operations::parked::ParkedMessage;
use pillarbox::operations::status::MessageStatus;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

pub(crate) use consumers::ConsumerSchema;
pub use consumers::{BEHIND_SECONDS, ConsumerState, ConsumerView, consumers, consumers_with_state};

/// A message of the log. Lists omit its headers and its payload.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LogMessage)]
pub struct MessageView {
    /// The id of the log entry.
    log_id: i64,
    #[schema(value_type = String, example = "evt_01890a5d-ac96-774b-bcce-b302099a8057")]
    event_id: EventId,
    at: DateTime<Utc>,
    /// The service or interface that posted it.
    #[schema(example = "sql")]
    source: String,
    tenant: String,
    #[schema(example = "order.created")]
    topic: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<String>,
    /// A number or a string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    aggregate_id: Option<AggregateId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    headers: Option<Box<RawValue>>,
    /// The payload, exactly as it was posted. `{"redacted": true}` if it is confidential, and `{"blanked": true}` if it was
    /// removed from the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

/// A message, and its status for each consumer that it matches.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LogMessageWithOutcomes)]
pub struct MessageWithOutcomes {
    #[serde(flatten)]
    message: MessageView,
    #[schema(value_type = Vec<crate::schemas::LogMessageStatus>)]
    consumers: Vec<MessageStatus>,
}

/// A parked message: it failed and waits for its retry, or it waits behind an earlier message of its key.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ParkedMessage)]
pub struct ParkedView {
    /// The number that identifies it for `retry` and `discard`.
    pub place: i64,
    #[schema(example = "relay.email")]
    pub consumer: String,
    pub attempts: i32,
    /// The time of the next retry. Absent: it waits behind an earlier message of its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    pub parked_at: DateTime<Utc>,
    /// Whether an operator has discarded it. The shard worker removes it when its turn comes.
    pub discarded: bool,
    pub message: MessageView,
}

/// A message that a consumer gave up after its retries.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ConsumerDeadLetter)]
pub struct DeadLetterView {
    pub id: i64,
    #[schema(example = "relay.email")]
    pub consumer: String,
    pub attempts: i32,
    pub last_error: String,
    pub died_at: DateTime<Utc>,
    pub message: MessageView,
}

impl MessageView {
    /// With headers and payload.
    pub fn full(message: Message) -> MessageView {
        let (headers, payload) = (Some(message.headers.clone()), Some(message.shown_payload()));
        MessageView { headers, payload, ..MessageView::brief(message) }
    }

    pub fn brief(message: Message) -> MessageView {
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
}

impl From<ParkedMessage> for ParkedView {
    fn from(parked: ParkedMessage) -> ParkedView {
        ParkedView {
            place: parked.id,
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
    pub fn full(dead: DeadLetter) -> DeadLetterView {
        DeadLetterView::with(dead, MessageView::full)
    }

    pub fn brief(dead: DeadLetter) -> DeadLetterView {
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

/// A message id as an operator enters it: `evt_` and a UUID, or the UUID alone.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub struct MessageIdInput(pub(crate) Uuid);

impl TryFrom<String> for MessageIdInput {
    type Error = &'static str;

    fn try_from(text: String) -> Result<MessageIdInput, &'static str> {
        let uuid = text.strip_prefix("evt_").unwrap_or(&text);
        uuid.parse().map(MessageIdInput).map_err(|_| "must be evt_ followed by a UUID, or the UUID alone")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the log has no message with this id: it was never posted, or retention has removed it; dead letters keep their messages"
    )]
    NoMessage,
    #[error("there is no consumer with this name; `pillarbox cursors` lists the consumers")]
    NoConsumer,
    #[error(
        "consumer {0} is in use: a running process would register it again at once. Stop its processes or remove it from the \
         settings, then drop it"
    )]
    ConsumerInUse(String),
    #[error("there is no consumer {0}; `pillarbox cursors` lists the consumers")]
    NoSuchConsumer(String),
    #[error(
        "consumer {0} is in use: stop its processes, or start them without it, so that neither position changes during the move"
    )]
    PositionInUse(String),
    #[error(
        "{consumer} has not processed the last {} of the log and would skip {}",
        counted(*.unread, "message", "messages"),
        if *.unread == 1 { "it" } else { "them" }
    )]
    WouldSkip { consumer: String, unread: i64 },
    #[error(transparent)]
    CannotContinue(#[from] CannotContinue),
    #[error("`from` and `like` must not be combined")]
    FromAndLike,
    #[error("nothing is parked under this place number (any more); `pillarbox parked list` shows the parked messages")]
    NotParked,
    #[error("an earlier message of the same key is parked at place {0}; retry or discard that one first")]
    ParkedBehind(i64),
    #[error("there is no such dead letter (any more); `pillarbox dead-letters list` shows the dead letters")]
    NoDeadLetter,
    #[error("its consumer {0} no longer exists, so it cannot be retried; it can only be discarded")]
    ConsumerDropped(String),
    #[error(
        "another message with the same event id is parked; when it is processed or discarded, this one can be retried"
    )]
    SameIdParked,
    #[error("there is no such replay; `pillarbox replay list` shows the replays")]
    NoReplay,
    #[error("must contain at least one filter, or `all: true`")]
    NoFilter,
    #[error("must not be combined with filters")]
    AllAndFilters,
    #[error("must be a time in the past")]
    FromInTheFuture,
    #[error("must be a time after `from`")]
    ToNotAfterFrom,
    #[error("the database failed: {0}; `pillarbox status` shows whether it can be reached and is migrated")]
    Database(#[from] sqlx::Error),
}

/// A count with its noun.
fn counted(count: i64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Why a consumer cannot continue exactly where another one has stopped.
#[derive(Debug, thiserror::Error)]
pub enum CannotContinue {
    #[error(
        "{} parked, which {other} has passed without having processed them, so they would be lost; retry or discard them first",
        counted(*.count, &format!("message of {other} is"), &format!("messages of {other} are"))
    )]
    OtherHasParked { other: String, count: i64 },
    #[error(
        "{other} has lapsed, or has yet to finish a replay, so its position does not tell what it has processed; start it until \
         `pillarbox cursors` shows that it keeps up"
    )]
    OtherIsIncomplete { other: String },
    #[error(
        "{} for {consumer} and not for {other}, and {consumer} has not read what it would skip; start {consumer} until it has \
         read it",
        counted(*.count, "message is", "messages are")
    )]
    WouldSkip { consumer: String, other: String, count: i64 },
    #[error(
        "{consumer} has read {} that {other} has not, so both or neither would process them; start {other} until it has read them",
        counted(*.count, "message", "messages")
    )]
    IsAhead { consumer: String, other: String, count: i64 },
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        let field = |pointer: &str| Problem::validation(vec![FieldError::body(pointer, &error)]);
        match &error {
            Error::NoMessage => Problem::not_found("message-not-found", &error),
            Error::NoConsumer | Error::NoSuchConsumer(_) => Problem::not_found("consumer-not-found", &error),
            Error::CannotContinue(_) => Problem::conflict("cannot-continue", &error),
            Error::WouldSkip { .. } => Problem::conflict("would-skip", &error),
            Error::FromAndLike => {
                Problem::validation(["/from", "/like"].map(|pointer| FieldError::body(pointer, &error)).into())
            }
            Error::ConsumerInUse(_) | Error::PositionInUse(_) => Problem::conflict("consumer-in-use", &error),
            Error::NotParked => Problem::not_found("parked-not-found", &error),
            Error::ParkedBehind(_) => Problem::conflict("parked-behind", &error),
            Error::NoDeadLetter => Problem::not_found("dead-letter-not-found", &error),
            Error::ConsumerDropped(_) => Problem::conflict("consumer-gone", &error),
            Error::SameIdParked => Problem::conflict("same-id-parked", &error),
            Error::NoReplay => Problem::not_found("replay-not-found", &error),
            Error::NoFilter => field(""),
            Error::AllAndFilters => field("/all"),
            Error::FromInTheFuture => field("/from"),
            Error::ToNotAfterFrom => field("/to"),
            Error::Database(cause) => http_kit::database::problem(cause),
        }
    }
}
