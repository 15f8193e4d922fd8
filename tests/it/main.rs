//! Integration tests: what Pillarbox guarantees, proved on real servers. `tests/README.md` explains how to write one.
//!
//! All of them are one binary, so that they are linked once. A test module proves one topic and says so in its first line.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod accounts;
mod amqp;
mod confidential;
mod consumers;
mod days;
mod delivery;
mod events;
mod events_and_joins;
mod example_service;
mod failover;
mod guides;
mod hub;
mod identity;
mod inbox;
mod joins;
mod library;
mod log;
mod mail;
mod notifications;
mod operator;
mod parity;
mod progress;
mod relay;
mod server;
mod soak;
mod support;
mod tenants;
