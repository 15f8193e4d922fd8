//! The hub: every accepted event reaches its subscribers at least once, in the order of its lane.

mod addresses;
mod attempt_persistence;
mod database_outage;
mod dead_letter_api;
mod dead_letter_delivery;
mod delivery;
mod export;
mod fanout;
pub(crate) mod fixture;
mod ingest;
mod isolation;
mod load;
mod matching;
mod message_api;
pub(crate) mod process;
pub(crate) mod recorder;
mod replicas;
mod responses;
mod restored_copy;
mod retention;
pub(crate) mod rows;
mod secret_headers;
mod subscriber_api;
mod subscriber_changes;
mod subscriber_secrets;
mod webhook_format;
