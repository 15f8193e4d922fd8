//! Proves that consumers of the log process every message once, in the order of its key: handlers, retries and dead
//! letters, replays, leases of shards, and crashes of PostgreSQL.

mod database_crashes;
mod dedicated_connection;
mod default_retries;
mod error_texts;
mod failures;
mod handlers;
pub(crate) mod removal;
mod replay_ranges;
mod replays;
pub(crate) mod shard_workers;
mod shards;
pub(crate) mod support;
