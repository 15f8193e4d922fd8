//! Streams: events that a tenant pulls, in order per key, instead of getting them as webhooks.

pub(crate) mod domain;
mod fields;
mod flow;
pub(crate) mod http;
pub(crate) mod store;
mod view;
pub(crate) mod waiters;
