//! What Pillarbox promises, on real servers. One binary, so that it links once. `tests/README.md` says how to write one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod api;
mod auth;
mod broker;
mod commands;
mod consumers;
mod consuming;
mod crash;
mod cursors;
mod dependencies;
mod discarding;
mod errors;
mod hostile;
mod idempotency;
mod instance;
mod intake;
mod keys;
mod log;
mod operator;
mod operator_commands;
mod parity;
mod relay;
mod replays;
mod secrets;
mod shards;
mod starting;
mod traces;
