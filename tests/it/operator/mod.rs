//! Proves that an operator sees and repairs consumers, parked messages and dead letters, over HTTP and with commands.

pub(crate) mod commands;
mod discarding;
mod http;
mod overview;
mod runbook;
mod same_ids;
mod tail;
