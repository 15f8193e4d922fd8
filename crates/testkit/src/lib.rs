//! Test support for all crates of Pillarbox. It is a dev-dependency and never ships.
//!
//! Tests use real servers, which `scripts/with-servers` starts and whose addresses [`servers`] returns. Each test
//! creates its own resources on them, so that all tests run at the same time without seeing each other:
//!
//! | a test needs             | it uses                                                                     |
//! |--------------------------|-----------------------------------------------------------------------------|
//! | PostgreSQL               | [`TestDatabase`]: a separate, migrated database                             |
//! | a connection pooler      | [`TestPooler`]: a separate PgBouncer                                        |
//! | RabbitMQ                 | [`TestVhost`]: a separate vhost                                             |
//! | Redis                    | [`TestRedis`]: a separate key prefix                                        |
//! | to wait for a condition  | [`eventually`]: polls a condition, with a deadline                          |
//! | network faults           | [`FaultProxy`]: refuses, cuts, stalls, mutes, delays or redirects them      |
//! | servers it may kill      | [`PrivateServers`]: a separate PostgreSQL and RabbitMQ, for faults          |
//! | a Redis it may kill      | [`PrivateRedis`]: a separate Redis, restarted empty or with what it has saved    |
//! | a failover               | [`Standby`]: a streaming copy of a private PostgreSQL, which it promotes    |
//! | days to pass             | [`MovableTime`]: a separate PostgreSQL whose time the test moves            |
//! | Pillarbox                | [`TestApp`]: the real roles in this process, and a [`Client`] to call them  |
//! | an endpoint for webhooks | [`Receiver`]: records requests and responds as the test configures it       |
//! | what its code logs       | [`CapturedLog`]: the log of its thread                                      |
//! | the binary itself        | [`Pillarbox`]: the real process of [`program`], which can be killed at any time |
//! | a person at a terminal   | [`Terminal`]: an interactive shell, into which the test pastes commands     |
//!
//! Dropping a value releases its resource, also when the test panics. A helper that fails panics: a test has no use
//! for an error value. A test that uses any of these has a time limit (`watchdog`) after which the run fails with the
//! name of the test.
//!
//! Nothing in this crate knows a table, a topic or a route, and nothing retries a test.

#![allow(clippy::expect_used, reason = "a panic is how a test fails")]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod app;
mod captured_log;
mod client;
mod eventually;
mod fault;
mod movable_time;
mod pooler;
mod postgres;
mod private_redis;
mod private_servers;
mod process;
mod program;
mod rabbit;
mod receiver;
mod redis;
pub mod servers;
mod standby;
mod terminal;
mod watchdog;

pub use app::TestApp;
pub use captured_log::CapturedLog;
pub use client::{Client, Response};
pub use eventually::{Condition, eventually};
pub use fault::{FaultProxy, LeftBehind};
pub use movable_time::MovableTime;
pub use pooler::TestPooler;
pub use postgres::TestDatabase;
pub use private_redis::PrivateRedis;
pub use private_servers::{PrivateServers, Server};
pub use process::{Pillarbox, command};
pub use program::program;
pub use rabbit::TestVhost;
pub use receiver::{Received, Receiver, Reply};
pub use redis::TestRedis;
pub use standby::Standby;
pub use terminal::Terminal;

/// Returns a name that no other test uses, in this process or another.
fn unique_name() -> String {
    format!("test_{}", uuid::Uuid::new_v4().simple())
}
