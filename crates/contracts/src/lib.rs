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
pub mod progress;

/// The `source` values of the services. Code sets the source of a message; a caller cannot choose it.
pub const SERVICE_SOURCES: [&str; 5] =
    [events::SOURCE, joins::SOURCE, identity::SOURCE, progress::SOURCE, notify::SOURCE];
/// The `source` of messages that are posted in SQL.
pub const SQL_SOURCE: &str = "sql";
/// The `source` of events that are posted to the hub. The notify service posts those of its notifications.
pub const HUB_SOURCE: &str = "hub";
/// Topics that only services read: they reconcile their data with each other, and exchange personal data. They are never
/// exported.
pub const INTERNAL_TOPICS: [&str; 5] =
    [events::VERSIONS, events::RESTATED, joins::COUNTED, joins::RECOUNTED, identity::ACCOUNT_CONTACT_CHANGED];

pub use envelope::{Envelope, EventId, MESSAGE_BYTES_MAX, SCHEMA_VERSION};
