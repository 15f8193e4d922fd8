//! The commands that are clients of the HTTP API, and what they share with the others.
//!
//! - [`api`]: requests to a server. `https`: its connections. [`contexts`]: named targets of the commands.
//! - [`table`]: output. [`pages`]: lists of the API. [`time`] and [`arguments`]: values of options.
//! - One module for each command, such as [`subscribers`]. Each gets an [`api::Api`], so it knows neither
//!   the settings nor the data folder of an installation; the program finds out the address and the credentials.
//! - [`listen`]: receives webhooks, and needs no server.
//!
//! Nothing here opens a database.

// Everything that is printed passes through `table`, which escapes what would act on a terminal.
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails"))]

pub mod api;
pub mod arguments;
mod consumers;
pub mod contexts;
pub mod cursors;
pub mod dead_letters;
pub mod deliveries;
pub mod emails;
pub mod event_types;
mod failure;
mod https;
pub mod keys;
pub mod listen;
pub mod notifications;
pub mod pages;
pub mod parked;
pub mod replays;
pub mod send;
pub mod streams;
pub mod subscribers;
pub mod table;
pub mod tail;
pub mod tenants;
pub mod time;
pub mod webhook_dead_letters;
pub mod webhook_replays;

pub use failure::Failure;
