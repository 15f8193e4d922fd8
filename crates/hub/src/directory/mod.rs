//! The directory of subscribers and streams: which events each of them matches.
//!
//! Fan-out and replays read it; a change to a subscriber is answered when all dispatchers have applied it ([`sync`]).

pub(crate) mod domain;
pub(crate) mod fields;
pub(crate) mod store;
pub(crate) mod sync;
