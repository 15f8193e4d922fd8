//! The events and joins services together, connected by messages only.

mod publication;
mod reconciliation;
pub(crate) mod scenario;
