//! What happens: one transaction for each use-case. Nothing else decides.

pub(crate) mod event;
pub(crate) mod feed;
pub mod reconcile;
