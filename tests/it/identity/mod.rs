//! The identity service: accounts, sessions, tokens, limits, hashes of passwords, and subscriptions.

mod accounts;
mod contested;
mod deletion;
pub(crate) mod examples;
pub(crate) mod fixture;
mod hashing;
mod limits;
mod passwords;
mod refresh;
mod roles;
mod secrecy;
mod sessions;
mod subscriptions;
mod timing;
mod tokens;
