//! The names of the AMQP headers that the relay adds to a message and the intake reads.

/// The beginning of the names, except that of [`TRACE`].
pub(crate) const PREFIX: &str = "pillarbox-";

/// The ordering key of the message.
pub(crate) const KEY: &str = "pillarbox-key";
/// The tenant of the message.
pub(crate) const TENANT: &str = "pillarbox-tenant";
/// The source of the message in the log that it was published from.
pub(crate) const SOURCE: &str = "pillarbox-source";
/// Proves that a relay of this installation has published the message: see [`MessageSigner`](crate::MessageSigner).
pub(crate) const SIGNATURE: &str = "pillarbox-signature";
/// When the payload of a confidential message expires. A reader that stores it also blanks it then.
pub(crate) const CONFIDENTIAL_UNTIL: &str = "pillarbox-confidential-until";
/// The beginning of the names of the headers that the producer has posted with the message.
pub(crate) const OF_PRODUCER: &str = "pillarbox-header-";
/// The W3C trace context of the message.
pub(crate) const TRACE: &str = "traceparent";

/// In the headers of a dead letter whose body was not stored as a whole: the size of the body in bytes.
pub(crate) const BODY_BYTES: &str = "pillarbox-body-bytes";
/// The same: the SHA-256 of the body, in hexadecimal digits.
pub(crate) const BODY_SHA256: &str = "pillarbox-body-sha256";
