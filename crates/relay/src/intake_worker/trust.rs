//! Whom the intake of a queue believes.

use chrono::{DateTime, Utc};

use crate::headers;
use crate::intake::Incoming;
use crate::signature::{MessageSigner, SignedFields};

/// Which messages of the queue of a subscription are believed to be those of services.
pub(crate) struct Trust {
    /// Only messages from these sources are accepted. Empty: from all sources, and from strangers.
    pub(crate) sources: Vec<String>,
    /// Only messages with these aggregate types are accepted. Empty: all.
    pub(crate) aggregate_types: Vec<String>,
    /// Whether other programs know the queue. What is not accepted from it becomes a dead letter, because nobody else gets it.
    /// Otherwise it is skipped: the queue is bound for more than the subscription needs.
    pub(crate) is_shared: bool,
    pub(crate) signer: MessageSigner,
    /// See [`RelaySettings::accept_unsigned_until`](crate::RelaySettings).
    pub(crate) accept_unsigned_until: Option<DateTime<Utc>>,
}

/// Who has published a message.
pub(super) enum Sender<'a> {
    /// A relay of this installation has published it for this source.
    Service(&'a str),
    /// Anybody else. Its ids, its source and its tenant may be invented.
    Stranger,
}

impl Trust {
    /// Signed messages are believed to be those of services, and those of strangers are accepted, too.
    pub(crate) fn of_all(signer: MessageSigner) -> Trust {
        let (sources, aggregate_types) = (Vec::new(), Vec::new());
        Trust { sources, aggregate_types, is_shared: false, signer, accept_unsigned_until: None }
    }

    pub(super) fn sender_of<'a>(&'a self, one: &'a Incoming, now: DateTime<Utc>) -> Sender<'a> {
        let header = |name| one.headers.get(name).map(String::as_str);
        let source = header(headers::SOURCE);
        let Some(signature) = header(headers::SIGNATURE) else {
            let is_accepted = self.accept_unsigned_until.is_some_and(|end| now < end);
            // The relay of an earlier version set the source, or, if it is older still, published only its own messages.
            let assumed = source.or(self.sources.first().map(String::as_str));
            return if is_accepted { Sender::Service(assumed.unwrap_or_default()) } else { Sender::Stranger };
        };
        let (Some(message_id), Some(source), Some(tenant), Some(kind)) =
            (one.message_id.as_deref(), source, header(headers::TENANT), one.kind.as_deref())
        else {
            return Sender::Stranger;
        };
        let fields = SignedFields { message_id, source, tenant, kind, key: header(headers::KEY), body: &one.body };
        if self.signer.verify(&fields, signature) { Sender::Service(source) } else { Sender::Stranger }
    }
}
