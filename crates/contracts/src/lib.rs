//! The messages that services exchange: envelope, topics and payload types. This crate performs no I/O.
//!
//! Schemas change by addition only. A reader ignores fields that it does not know; a writer never renames or removes a
//! field.

pub mod email;
mod envelope;
pub mod events;
pub mod identity;
pub mod joins;
pub mod notify;

/// The `source` values of the services, including one that is still to come (progress). Code sets
/// the source of a message; a caller cannot choose it.
pub const SERVICE_SOURCES: [&str; 5] = [events::SOURCE, joins::SOURCE, identity::SOURCE, "progress", notify::SOURCE];
/// The `source` of messages that are posted in SQL.
pub const SQL_SOURCE: &str = "sql";
/// Topics that services use to reconcile their data with each other. They are never exported.
pub const INTERNAL_TOPICS: [&str; 4] = [events::VERSIONS, events::RESTATED, joins::COUNTED, joins::RECOUNTED];

pub use envelope::{Envelope, EventId, MESSAGE_BYTES_MAX, SCHEMA_VERSION};
