//! Whom the intake of a queue believes.

use crate::headers;
use crate::intake::Incoming;
use crate::signature::{MessageSigner, SignedFields};

/// Which messages of the queue of a subscription are believed to be those of services.
pub(crate) struct Trust {
    /// Only messages from these sources are accepted. Empty: from all sources, and from strangers.
    pub(crate) sources: Vec<String>,
    /// Only messages with these aggregate types are accepted. Empty: all.
    pub(crate) aggregate_types: Vec<String>,
    /// Whether other programs know the queue. What is not accepted from it becomes a dead letter, because no other program gets it.
    /// Otherwise it is skipped: the queue is bound for more than the subscription needs.
    pub(crate) is_shared: bool,
    pub(crate) signer: MessageSigner,
}

/// Who has published a message.
pub(super) enum Sender<'a> {
    /// A relay of this installation has published it for this source.
    Service(&'a str),
    /// Anybody else. Its ids, its source and its tenant may be invented.
    Stranger,
}

impl Trust {
    /// Signed messages are believed to be those of services, and those of strangers are also accepted.
    pub(crate) fn of_all(signer: MessageSigner) -> Trust {
        let (sources, aggregate_types) = (Vec::new(), Vec::new());
        Trust { sources, aggregate_types, is_shared: false, signer }
    }

    pub(super) fn sender_of<'a>(&'a self, one: &'a Incoming) -> Sender<'a> {
        let header = |name| one.headers.get(name).map(String::as_str);
        let (Some(signature), Some(message_id), Some(source), Some(tenant), Some(kind)) = (
            header(headers::SIGNATURE),
            one.message_id.as_deref(),
            header(headers::SOURCE),
            header(headers::TENANT),
            one.kind.as_deref(),
        ) else {
            return Sender::Stranger;
        };
        let fields = SignedFields { message_id, source, tenant, kind, key: header(headers::KEY), body: &one.body };
        if self.signer.verify(&fields, signature) { Sender::Service(source) } else { Sender::Stranger }
    }
}
