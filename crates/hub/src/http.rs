//! The door for people and producers.

pub(crate) mod ingest;
