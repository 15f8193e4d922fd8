//! Proves what holds for the server as a whole: its start and its crashes, the command line, authentication, the rules of
//! every HTTP route, and behaviour while a dependency is down.

mod api;
mod auth;
mod cli;
mod crash;
mod dependencies;
mod idempotency;
mod invalid_requests;
mod keys;
mod migration_lock;
mod pooler;
pub(crate) mod process;
mod secrets;
mod starting;
mod traces;
