//! The hub: webhooks, ordered, signed and retried.

pub mod domain;
