//! What services say to each other: envelope, topics, message types. No I/O.
//!
//! Schemas change by addition only: a reader ignores what it does not know, a writer never renames or removes.

mod envelope;
pub mod events;
pub mod joins;

pub use envelope::{Envelope, EventId, MESSAGE_BYTES_MAX, SCHEMA_VERSION};
