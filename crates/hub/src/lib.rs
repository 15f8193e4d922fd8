//! The hub: webhooks, ordered, signed and retried.

pub mod address;
pub mod client;
mod dial;
pub mod headers;
pub mod signature;
pub mod target;
mod wire;
