//! What services say to each other: envelope, topics, message types. No I/O.
//!
//! Schemas change by addition only: a reader ignores what it does not know, a writer never renames or removes.

mod envelope;
pub mod events;
pub mod joins;

/// Who speaks for the services: the `source` of what they say. No caller can choose it.
pub const SERVICE_SOURCES: [&str; 5] = [events::SOURCE, joins::SOURCE, "identity", "progress", "notify"];
/// What services say to compare what they have: nobody else's business.
pub const BETWEEN_SERVICES: [&str; 2] = [events::STATED, joins::COUNTED];

pub use envelope::{Envelope, EventId, MESSAGE_BYTES_MAX, SCHEMA_VERSION};
