//! What the tests of Pillarbox stand on. A dev-dependency; nothing here ships.
//!
//! Tests use real servers, which `scripts/with-servers` starts and [`servers`] finds. Each test takes its own share of
//! them, so that all tests run at once and none sees another:
//!
//! | a test needs             | it takes                                                              |
//! |--------------------------|-----------------------------------------------------------------------|
//! | PostgreSQL               | [`TestDatabase`]: a database of its own, migrated                     |
//! | a pooler before it       | [`TestPooler`]: a PgBouncer of its own                                |
//! | RabbitMQ                 | [`TestVhost`]: a vhost of its own                                     |
//! | Redis                    | [`TestRedis`]: a key prefix of its own                                |
//! | something to become true | [`drain`]: waits for a condition, with a deadline                     |
//! | a network that fails     | [`FaultProxy`]: refuses, cuts, stalls, mutes or delays connections    |
//! | servers to kill          | [`OwnServers`]: a PostgreSQL and a RabbitMQ of its own, restarted or starved |
//! | a server                 | [`TestApp`]: the real roles in this process, and a [`Client`] to call it |
//! | an endpoint for webhooks | [`Receiver`]: keeps what came, and answers as it is told               |
//! | the program itself       | [`Pillarbox`]: the real binary, which can be killed at any moment     |
//!
//! What a test takes it gives back when the value is dropped, also when the test panics. A helper that cannot do its
//! work panics: in a test there is nobody to handle an error.
//!
//! Absences: nothing here knows a table, a topic or a route, and nothing retries a test.

#![allow(clippy::expect_used, reason = "a panic is how a test fails")]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod app;
mod client;
mod drain;
mod fault;
mod own_servers;
mod pooler;
mod postgres;
mod process;
mod rabbit;
mod receiver;
mod redis;
pub mod servers;

pub use app::TestApp;
pub use client::{Answer, Client};
pub use drain::{Progress, drain};
pub use fault::FaultProxy;
pub use own_servers::OwnServers;
pub use pooler::TestPooler;
pub use postgres::TestDatabase;
pub use process::{Pillarbox, command};
pub use rabbit::TestVhost;
pub use receiver::{Received, Receiver, Reply};
pub use redis::TestRedis;

/// A name that no other test has, in this process or another.
fn unique_name() -> String {
    format!("test_{}", uuid::Uuid::new_v4().simple())
}
