//! Commands of operators about one hub message, typed from the HTTP request to their execution.
//!
//! An HTTP request becomes a [`CommandRequest`], posted to the log with source `hub.control`. Fan-out decodes it and stores
//! an [`OperatorCommand`] for the dispatcher that owns the subscriber, which executes it. Decoding is strict at both steps:
//! a text that this version does not know is never taken for another command.

use pillarbox::log::Tenant;
use pillarbox::log::{Message, Post, Source};
use serde::{Deserialize, Serialize};
use serde_json::from_str;
use serde_json::value::{RawValue, to_raw_value};
use strum::{EnumString, IntoStaticStr};
use uuid::Uuid;

use crate::deliveries::message::LaneKey;
use crate::error::Error;

/// The source of command requests. No caller can post to it.
pub(crate) const CONTROL_SOURCE: Source = Source::new("hub.control");
const RETRY_TOPIC: &str = "hub.dead_letter.retry";
const DEAD_LETTER_TOPIC: &str = "hub.message.dead_letter";
const REPLAY_TOPIC: &str = "hub.replay.changed";
const ACCEPTED_TOPIC: &str = "hub.event.accepted";

/// The work of the dispatcher on a hub message. The names are the values of the column `command.action`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumString, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum OperatorCommand {
    /// Send the dead head of a blocked lane again.
    Retry,
    /// Give the message up without (further) attempts.
    DeadLetter,
}

impl OperatorCommand {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A stored command that waits for its execution.
#[derive(Debug, Clone)]
pub(crate) struct PendingCommand {
    pub(crate) id: i64,
    pub(crate) key: LaneKey,
    pub(crate) n: i64,
    pub(crate) command: OperatorCommand,
    pub(crate) by: String,
}

/// A request as the log carries it. The topics and the names of the fields are part of the wire format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CommandRequest {
    Retry(RetryRequest),
    DeadLetter(DeadLetterRequest),
    ReplayChanged(ReplayNotice),
    EventAccepted(AcceptedNotice),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RetryRequest {
    pub(crate) dead_letter: Uuid,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeadLetterRequest {
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) by: String,
}

/// A replay was created, resumed or canceled: fan-out loads the replays again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplayNotice {
    pub(crate) replay: Uuid,
}

/// A rejected event was retried and accepted, and is deferred: fan-out loads the tenants with deferred events again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AcceptedNotice {
    pub(crate) event: Uuid,
}

impl CommandRequest {
    /// The log message that carries this request. Its key is the subscriber (or the replay), so requests for one
    /// subscriber keep their order. Fails if the request cannot be encoded.
    pub(crate) fn to_post(&self, tenant: &Tenant, key: Uuid) -> serde_json::Result<Post> {
        let (topic, payload): (&'static str, Box<RawValue>) = match self {
            CommandRequest::Retry(request) => (RETRY_TOPIC, to_raw_value(request)?),
            CommandRequest::DeadLetter(request) => (DEAD_LETTER_TOPIC, to_raw_value(request)?),
            CommandRequest::ReplayChanged(notice) => (REPLAY_TOPIC, to_raw_value(notice)?),
            CommandRequest::EventAccepted(notice) => (ACCEPTED_TOPIC, to_raw_value(notice)?),
        };
        Ok(Post { tenant: tenant.clone(), ..Post::new(topic, payload) }.with_key(key.to_string()))
    }

    /// Fails if the topic is unknown or the payload does not fit the topic.
    pub(crate) fn decode(message: &Message) -> Result<CommandRequest, UnknownCommand> {
        decode(&message.topic, message.payload.get())
    }
}

/// Why a command request cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnknownCommand {
    #[error(
        "unknown topic; this version knows `{RETRY_TOPIC}`, `{DEAD_LETTER_TOPIC}`, `{REPLAY_TOPIC}` and `{ACCEPTED_TOPIC}`"
    )]
    Topic,
    #[error(transparent)]
    Payload(#[from] serde_json::Error),
}

fn decode(topic: &str, payload: &str) -> Result<CommandRequest, UnknownCommand> {
    Ok(match topic {
        RETRY_TOPIC => CommandRequest::Retry(from_str(payload)?),
        DEAD_LETTER_TOPIC => CommandRequest::DeadLetter(from_str(payload)?),
        REPLAY_TOPIC => CommandRequest::ReplayChanged(from_str(payload)?),
        ACCEPTED_TOPIC => CommandRequest::EventAccepted(from_str(payload)?),
        _ => return Err(UnknownCommand::Topic),
    })
}

/// The log message that carries an operator command to fan-out.
pub(crate) fn command_post(tenant: &Tenant, key: Uuid, request: &CommandRequest) -> Result<Post, Error> {
    request.to_post(tenant, key).map_err(|error| sqlx::Error::Encode(error.into()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_command_does_not_decode() {
        for unknown in ["", "discard", "Retry", "dead-letter", "retry "] {
            assert!(unknown.parse::<OperatorCommand>().is_err(), "{unknown:?}");
        }
        for command in [OperatorCommand::Retry, OperatorCommand::DeadLetter] {
            assert_eq!(command.as_str().parse(), Ok(command));
        }
        assert_eq!(
            [OperatorCommand::Retry, OperatorCommand::DeadLetter].map(OperatorCommand::as_str),
            ["retry", "dead_letter"]
        );
    }

    #[test]
    fn an_unknown_topic_does_not_decode() {
        let id = Uuid::nil();
        let retry = format!(r#"{{"dead_letter":"{id}"}}"#);
        let expected = CommandRequest::Retry(RetryRequest { dead_letter: id });
        assert_eq!(decode("hub.dead_letter.retry", &retry).unwrap(), expected);
        assert!(decode("hub.message.discard", &retry).is_err());
        assert!(decode("hub.message.dead_letter", &retry).is_err(), "the payload of another command");
    }

    #[test]
    fn the_wire_format_of_requests_is_stable() {
        let (tenant, id): (Tenant, _) = ("acme".parse().unwrap(), Uuid::nil());
        let request = DeadLetterRequest { subscriber: id, n: 7, by: "key ops".to_owned() };
        let post = CommandRequest::DeadLetter(request.clone()).to_post(&tenant, id).unwrap();
        assert_eq!(post.topic, "hub.message.dead_letter");
        assert_eq!(post.payload.get(), format!(r#"{{"subscriber":"{id}","n":7,"by":"key ops"}}"#));
        assert_eq!(decode(&post.topic, post.payload.get()).unwrap(), CommandRequest::DeadLetter(request));
    }
}
