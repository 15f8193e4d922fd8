//! Classifies the messages of the log: events, commands of operators, and others.

use pillarbox::consumers::Delivery;
use pillarbox::log::Message;
use uuid::Uuid;

use crate::deliveries::command::{CONTROL_SOURCE, CommandRequest};

/// The meaning of a message of the log to fan-out.
pub(super) enum Meaning {
    Event,
    Command(CommandRequest),
    /// It was processed before, or this version does not know it.
    Nothing,
}

impl Meaning {
    /// An unknown command is logged and skipped. If fan-out waited for a version that knows it, all events would also wait.
    pub(super) fn of_command(message: &Message) -> Meaning {
        match CommandRequest::decode(message) {
            Ok(request) => Meaning::Command(request),
            Err(error) => {
                let (topic, message_id) = (&message.topic, message.message_id);
                tracing::error!(topic, %message_id, %error, "an operator command cannot be decoded and is skipped");
                Meaning::Nothing
            }
        }
    }

    pub(super) fn dead_letter(&self) -> Option<Uuid> {
        match self {
            Meaning::Command(CommandRequest::Retry(request)) => Some(request.dead_letter),
            Meaning::Command(
                CommandRequest::DeadLetter(_) | CommandRequest::ReplayChanged(_) | CommandRequest::EventAccepted(_),
            )
            | Meaning::Event
            | Meaning::Nothing => None,
        }
    }
}

pub(super) fn is_command(item: &Delivery) -> bool {
    item.message.source == CONTROL_SOURCE.as_str()
}

/// Whether the message is replayed in run 0: the replay repairs what the live run has missed.
pub(super) fn is_repair(item: &Delivery) -> bool {
    item.is_replayed && item.run == 0
}
