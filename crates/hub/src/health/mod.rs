//! The health of subscribers, and the totals of all attempts for operators.

pub(crate) mod counters;
pub(crate) mod counts;
mod flow;
pub(crate) mod http;
pub(crate) mod overview;
pub(crate) mod store;
pub(crate) mod totals;
mod view;
