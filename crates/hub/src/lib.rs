//! The hub: webhooks, ordered, signed and retried.

pub mod address;
pub mod client;
mod dial;
mod dispatch;
pub mod domain;
mod fanout;
pub mod headers;
pub mod signature;
mod store;
pub mod target;
