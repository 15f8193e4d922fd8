//! RabbitMQ as a process uses it.

use std::sync::Arc;

use relay::{Broker, MessageSigner};

/// RabbitMQ, and the signatures of the messages that services exchange over it.
#[derive(Clone)]
pub(crate) struct MessageBus {
    pub(crate) broker: Arc<Broker>,
    pub(crate) signer: MessageSigner,
}
