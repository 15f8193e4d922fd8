//! The hub: webhooks, ordered, signed and retried.
