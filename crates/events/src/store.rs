//! What is kept, in the schema `pillarbox_events`. A function that takes a connection joins the caller's transaction.

pub(crate) mod cities;
pub(crate) mod event;
pub(crate) mod feed;
pub(crate) mod reconciliation;
pub(crate) mod trending;
