//! The log and its consumers. PostgreSQL only: no module here knows a route or a broker.
//!
//! | task                                            | use                                                       |
//! |-------------------------------------------------|-----------------------------------------------------------|
//! | post a message in the transaction of a change   | [`log::post()`], [`log::post_all`]                        |
//! | process every message once, in this database    | a [`consumers::Handler`], run by [`consumers::Runtime`]   |
//! | wait for the handlers of the same process       | [`consumers::LocalHandlers`]                              |
//! | send messages elsewhere                         | a [`consumers::Processor`], run by [`consumers::Runtime`] |
//! | divide other work among processes               | [`consumers::ShardAssignment`]                            |
//! | answer a repeated request without a new effect  | [`idempotency::run_once`]                                 |
//! | execute many requests in one transaction        | [`batched_writes`]                                        |
//! | reference log entries, and load them later      | [`log::LogRef`], [`operations::retention_hold`]           |
//! | show the state                                  | [`operations::status`], [`operations::browse`]            |
//! | post a secret, and remove it when it was used   | [`log::Post::confidential_until`], [`log::blank_key`]     |
//! | retry or discard failed messages                | [`operations::parked`], [`operations::dead_letters`]      |
//! | read again, reset, delete, recover              | [`operations::replays`], [`operations::cursors`], [`operations::recovery`] |
//! | begin and commit a transaction                  | [`database::Database`]                                    |
//! | connect, migrate, classify errors               | [`database`]                                              |
//!
//! # Modules
//!
//! Dependencies point one way: `database <- log <- consumers <- operations`. `idempotency` uses `database`,
//! `batched_writes` uses both, and `operations` uses `idempotency` to delete expired responses. Within a group there are no cycles.
//!
//! # Tables
//!
//! This crate owns the schema `pillarbox`:
//! - `log`, `retention_hold`, `chosen_id`, `aggregate_type`: the messages, the holds on old ones, message ids that producers
//!   have chosen, and what business events can be about;
//! - `confidential`: the messages whose payloads are to be blanked;
//! - `cluster_identity`: in which cluster and database the log was written; `incarnation`: whether transactions may be lost;
//! - `cursor`, `position`, `filter_change`: the consumers, how far they have read, and which filters they had before;
//! - `replica`, `shard_worker`, `lease`: the running processes, and the owner of each shard;
//! - `inbox`, `inbox_foreign`: which messages a handler has already processed;
//! - `parked`, `dead_letter`, `discarded`: the messages that failed; `unrouted`: those that no queue took;
//! - `replay`, `replay_shard`: requested replays and their progress;
//! - `idempotency`: responses to HTTP requests;
//! - the view `outbox_status`, and `migration`.
//!
//! # Invariants
//!
//! - A log row is never updated, except that the payload of a confidential message is blanked. It is deleted only when
//!   retention drops its day.
//! - A log row gets its transaction id before its id. [`log::Reader`] depends on it.
//! - Messages are posted only by the functions `post*` of [`log`] and by the SQL function `pillarbox.post`. These set
//!   `source`; a caller cannot.
//! - A shard of a consumer has one owner. Only the owner can commit, because every commit locks the owner's row. The row is
//!   lost whenever transactions may be lost, so nothing that was derived from lost ones is committed.
//! - The outcomes of a batch are committed together with the new positions, or not at all.

use kit::telemetry::MetricHelp;

pub mod batched_writes;
pub mod consumers;
pub mod database;
pub mod idempotency;
pub mod log;
pub mod operations;
pub mod service;

/// The metrics of this crate, with their help texts for `/metrics`.
pub const METRICS: &[MetricHelp] = &[
    ("pillarbox_clock_ahead_seconds", "How far the clock of the process is ahead of the database's clock."),
    ("pillarbox_consumer_messages_total", "Processed messages by consumer and outcome."),
    ("pillarbox_consumer_parked", "Messages that wait for a retry, and messages that wait behind them."),
    ("pillarbox_consumer_dead_letters", "Messages that were given up."),
    ("pillarbox_consumer_lapsed", "1 if the consumer was behind for too long and reads nothing any more."),
    ("pillarbox_consumer_lag_seconds", "Age of the oldest unread message; NaN if it cannot be measured."),
    ("pillarbox_consumer_lag_messages", "Number of unread messages of the log."),
    ("pillarbox_route_replay_waiting_seconds", "How long a route has waited for processes with other routes."),
    ("pillarbox_lag_measured_timestamp_seconds", "Unix time of the last measurement of all lags."),
];
