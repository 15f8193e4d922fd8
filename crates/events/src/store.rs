//! SQL for the schema `pillarbox_events`. Every function takes a connection, joins the caller's transaction and makes
//! no decisions.

pub(crate) mod audit;
pub(crate) mod cities;
pub(crate) mod event;
pub(crate) mod feed;
pub(crate) mod generation;
pub(crate) mod handover;
pub(crate) mod reconciliation;
pub(crate) mod trending;
