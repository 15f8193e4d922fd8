//! Signed messages between the relays and the readers of services' queues: they keep track of what has arrived.
//!
//! The reader of a queue announces it to all relays. A relay asks the reader through the queue itself whether the messages
//! that it has published before have arrived, and the reader replies to the queue of the relay's process.

use contracts::EventId;
use pillarbox::log::MessagePattern;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::headers;
use crate::intake::Incoming;
use crate::publish::Outgoing;
use crate::signature::{MessageSigner, SignedFields};

/// The exchange for announcements, to which each process with a relay binds its own queue.
pub(crate) const SERVICES_EXCHANGE: &str = "pillarbox.services";

/// The source of these messages. No service has it, so no message of a service is taken for one of them.
const SOURCE: &str = "relay";
const TENANT: &str = "main";

/// The content of such a message. `KIND` is AMQP's property `type`.
pub(crate) trait Control: Serialize + DeserializeOwned {
    const KIND: &'static str;
}

/// A queue has a reader, which records what it reads.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) queue: String,
    /// The messages that the queue is meant for.
    pub(crate) matching: MessagePattern,
}

/// Asks the reader of the queue which of these messages have not arrived. It is behind them in the queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Check {
    pub(crate) id: Uuid,
    /// The queue for the reply.
    pub(crate) reply_to: String,
    /// Source and id of each message.
    pub(crate) messages: Vec<(String, EventId)>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CheckReply {
    /// The id of the check.
    pub(crate) id: Uuid,
    /// Their positions in the list of the check.
    pub(crate) missing: Vec<usize>,
}

impl Control for Announcement {
    const KIND: &'static str = "pillarbox.announcement";
}

impl Control for Check {
    const KIND: &'static str = "pillarbox.check";
}

impl Control for CheckReply {
    const KIND: &'static str = "pillarbox.check_reply";
}

/// Returns the signed message. Fails if it cannot be encoded, which never happens.
pub(crate) fn seal<T: Control>(
    signer: &MessageSigner,
    routing_key: &str,
    content: &T,
) -> Result<Outgoing, serde_json::Error> {
    let body = serde_json::to_vec(content)?;
    let message_id = EventId(Uuid::now_v7()).to_string();
    let signature = signer.sign(&fields_of::<T>(&message_id, &body));
    let mut headers = vec![(headers::SOURCE.into(), SOURCE.to_owned()), (headers::TENANT.into(), TENANT.to_owned())];
    headers.extend(signature.map(|signature| (headers::SIGNATURE.into(), signature)));
    Ok(Outgoing {
        message_id,
        routing_key: routing_key.to_owned(),
        key: None,
        body: body.into(),
        headers,
        timestamp: chrono::Utc::now(),
        kind: T::KIND.to_owned(),
    })
}

/// Returns the content. None if it is another message, or if no process of this installation has signed it.
pub(crate) fn open<T: Control>(signer: &MessageSigner, one: &Incoming) -> Option<T> {
    if one.kind.as_deref() != Some(T::KIND) {
        return None;
    }
    let fields = fields_of::<T>(one.message_id.as_deref()?, &one.body);
    let is_genuine = signer.verify(&fields, one.headers.get(headers::SIGNATURE)?);
    is_genuine.then(|| serde_json::from_slice(&one.body).ok()).flatten()
}

fn fields_of<'a, T: Control>(message_id: &'a str, body: &'a [u8]) -> SignedFields<'a> {
    SignedFields { message_id, source: SOURCE, tenant: TENANT, kind: T::KIND, key: None, body }
}
