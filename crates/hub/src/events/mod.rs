//! Hub events: which messages of the log they are, how they are posted, and what became of them.
//!
//! | module | responsibility |
//! |---|---|
//! | [`selection`], [`export`], [`sql_events`] | which messages of the log are hub events |
//! | [`ingest`] | accepts events over HTTP, many in one transaction |
//! | [`flow`] | events, messages and attempts for the API; rejected events |

pub(crate) mod export;
pub(crate) mod flow;
pub(crate) mod http;
pub(crate) mod ingest;
pub(crate) mod selection;
pub(crate) mod sql_events;
pub(crate) mod store;
pub(crate) mod view;
