//! The log and its readers. PostgreSQL only: nothing here knows a route or a broker.
//!
//! | to do                                | take                                                                       |
//! |--------------------------------------|----------------------------------------------------------------------------|
//! | post in the transaction that it tells of | [`post`]                                                               |
//! | act once on every message            | [`handler::Handler`] in a [`lane::Lane`] of a [`cursor::Cursor`]            |
//! | carry messages elsewhere             | your own [`work::Work`] in a lane                                          |
//! | answer a repeated request once       | [`idempotency`]                                                            |
//! | look                                 | [`browse`], [`status`]                                                     |
//! | mend                                 | [`parked`], [`dead_letter`], [`replay`], [`cursor`], [`home`]              |
//!
//! Owns the schema `pillarbox`. Invariants: a log row is never updated, and goes only with its day. A row takes its transaction id before
//! its id. What is posted is posted by [`post`] or by the SQL function of the same name, which set `source`; a caller
//! cannot. A shard of a consumer has one owner, and only what its owner keeps counts. What a batch led to is kept together
//! with the new places, or not at all.

pub mod browse;
pub mod cursor;
pub mod database;
pub mod dead_letter;
pub mod filter;
pub mod handler;
pub mod hold;
pub mod home;
pub mod idempotency;
pub mod inbox;
pub mod lane;
pub mod lease;
pub mod log;
pub mod maintain;
pub mod moment;
pub mod own;
pub mod parked;
pub mod partition;
pub mod pooler;
pub mod post;
pub mod replay;
pub mod replica;
pub mod retry;
pub mod runtime;
mod settle;
pub mod status;
pub mod told;
pub mod watch;
pub mod work;
