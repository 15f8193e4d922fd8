//! The names of the AMQP headers that the relay adds to a message and the intake reads.

/// The ordering key of the message.
pub(crate) const KEY: &str = "pillarbox-key";
/// The tenant of the message.
pub(crate) const TENANT: &str = "pillarbox-tenant";
/// The source of the message in the log that it was published from.
pub(crate) const SOURCE: &str = "pillarbox-source";
/// The W3C trace context of the message.
pub(crate) const TRACE: &str = "traceparent";
