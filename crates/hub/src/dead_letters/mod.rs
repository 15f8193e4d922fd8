//! Dead letters: messages that were given up, to be retried or discarded.

mod flow;
pub(crate) mod http;
pub(crate) mod store;
mod view;
