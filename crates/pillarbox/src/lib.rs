//! Messages that commit with your data. A program posts a message in the transaction that changes its tables; handlers, in
//! this program or in others, process it: in order per key, with an effect that happens once, through any crash. All of it is in
//! PostgreSQL: no module here knows HTTP, a route or a broker.
//!
//! Start with [`Message`], [`post()`], [`Handle`] and [`Pillarbox`]; README.md has a first program, and the folder `examples`
//! five more. [`testing`] tests a handler without a running process.
//!
//! | task                                            | use                                                       |
//! |-------------------------------------------------|-----------------------------------------------------------|
//! | post a message of a type                        | [`post()`], with a type that implements [`Message`]       |
//! | process every message of a type once            | [`Pillarbox::handler`]                                    |
//! | post any message in the transaction of a change | [`log::post()`], [`log::post_all`]                        |
//! | process messages of several types               | [`Pillarbox::subscription`]: a [`consumers::Handler`]     |
//! | wait for the handlers of the same process       | [`consumers::LocalHandlers`]                              |
//! | send messages elsewhere                         | [`Pillarbox::processor`]: a [`consumers::Processor`]      |
//! | divide other work among processes               | [`consumers::ShardAssignment`]                            |
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
//! Dependencies point one way: `database <- log <- consumers <- operations`, and the typed face of the crate is above all.
//! Within a group there are no cycles.
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
//! - `idempotency`: responses to repeated requests, for the crate `service`; `work_lock`: periodic work that one process at a time does;
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

#![deny(missing_docs)]

use runtime::MetricHelp;

mod app;
pub mod consumers;
pub mod database;
mod handler;
pub mod log;
mod message;
pub mod operations;
pub mod testing;

pub use ::runtime::backoff::Backoff;
pub use app::{Pillarbox, Running, StartError};
pub use consumers::HandlerError;
pub use handler::{Handle, HandlerFn, Tx};
pub use message::{FromLog, Message, Received, post, post_of};

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
