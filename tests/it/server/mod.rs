//! Proves what holds for the server as a whole: its start and its crashes, the command line, authentication, the rules of
//! every HTTP route, and behaviour while a dependency is down.

pub(crate) mod api;
mod auth;
mod body_memory;
mod caller_share;
mod cli;
mod console;
mod contexts;
mod crash;
mod demo;
mod dependencies;
mod description;
mod embedded_crash;
mod embedded_tcp;
mod examples;
mod exposition;
mod generated_clients;
mod idempotency;
mod invalid_requests;
mod issuers;
mod keys;
mod malformed_parts;
mod metrics;
mod migration_lock;
mod pooler;
pub(crate) mod process;
mod response_memory;
mod role_before_body;
mod secrets;
mod shipped_defaults;
mod silent_connections;
mod starting;
mod traces;
mod upgrades;
mod warnings;
mod webhook_commands;
mod worker_pool;
