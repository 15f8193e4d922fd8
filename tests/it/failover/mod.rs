//! Failover to a standby that lacks the last transactions: what was remembered of them is neither used nor saved.

mod accepted_events;
mod cached_pages;
mod fixture;
mod incarnations;
mod subscribers;
