//! The hub: webhooks, ordered, signed and retried.

pub mod address;
pub mod client;
mod dial;
pub mod domain;
pub mod headers;
pub mod signature;
mod store;
pub mod target;
