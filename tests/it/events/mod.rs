//! The events service: its HTTP API, its feeds and its cache, and the counts that it receives from joins.

mod broker;
mod cache;
mod concurrency;
mod counts;
mod event_api;
mod feed;
pub(crate) mod fixture;
mod handover;
mod moderation;
mod reconciliation;
mod search;
mod shares;
mod trending;
