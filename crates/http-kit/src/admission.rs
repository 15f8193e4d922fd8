//! How callers share what is limited: one busy caller must not take it from the others.
//!
//! [`caller_id`] defines what one caller is, for all of it: a user; a tenant with all its API keys and portal tokens; or a network
//! of clients without credentials. [`limit`] counts each API key and each portal token separately, because its limit is that of a
//! credential.
//!
//! | what is limited                                | where                | how callers share it                      |
//! |------------------------------------------------|----------------------|-------------------------------------------|
//! | requests and events per second                 | [`limit`]            | each has its own limit                    |
//! | connections to the database, searches          | [`caller_share`]     | `fair_permits`: places, in turns          |
//! | memory of the bodies of requests               | `body_budget`        | [`fair_budget`]: as much as is then free  |
//! | memory of the bodies of responses              | [`response_budget`]  | [`fair_budget`]                           |
//! | places of streams and of pulls                 | [`fair_budget`]      | as much as is then free                   |
//! | work on one key at the same time               | [`gates`]            | first come, first served                  |

pub(crate) mod body_budget;
pub mod caller_id;
pub mod caller_share;
pub mod fair_budget;
mod fair_permits;
pub mod gates;
pub mod limit;
pub mod response_budget;
