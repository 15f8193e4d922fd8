//! Replays: jobs that send events again. Fan-out advances them.

pub(crate) mod domain;
pub(crate) mod fields;
pub(crate) mod flow;
pub(crate) mod http;
pub(crate) mod replay;
pub(crate) mod store;
mod view;
