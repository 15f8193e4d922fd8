//! The delivery of notifications: preferences, quiet hours, digests, webhooks, failures, crashes, one-click unsubscribe.

mod crashes;
mod digest_limits;
mod digests;
mod failures;
pub(crate) mod fixture;
mod operators;
mod outcomes;
mod preferences;
mod quiet_hours;
mod retention;
mod unsubscribe;
mod webhooks;
