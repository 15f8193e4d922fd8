//! The joins service: seats, waitlists and registrations under concurrency, crashes and lost messages.

mod audit;
mod concurrency;
mod crashes;
mod database_access;
mod event_updates;
pub(crate) mod fixture;
pub(crate) mod invariants;
mod moderation;
mod reconciliation;
mod registration_api;
mod separate_database;
mod sweeps;
