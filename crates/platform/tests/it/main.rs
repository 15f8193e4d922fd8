//! What Pillarbox promises, on real servers. One binary, so that it links once. `tests/README.md` says how to write one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod api;
mod auth;
mod broker;
mod bus;
mod commands;
mod consumers;
mod consuming;
mod crash;
mod cursors;
mod database_crashes;
mod dependencies;
mod discarding;
mod errors;
mod failing;
mod hostile;
mod hub_dead_letters;
mod hub_delivery;
mod hub_messages;
mod hub_people;
mod hub_subscribers;
mod idempotency;
mod instance;
mod intake;
mod intake_ids;
mod keys;
mod lanes;
mod log;
mod operator;
mod operator_commands;
mod parity;
mod posting;
mod relay;
mod relay_faults;
mod relaying;
mod replay_ranges;
mod replays;
mod retention;
mod secrets;
mod shards;
mod starting;
mod traces;
