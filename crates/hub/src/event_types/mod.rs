//! The catalogue of event types of a tenant: descriptions, schemas in versions, and examples. A tenant without one uses that of
//! the tenant `main`, if it is shared.
//!
//! | module | responsibility |
//! |---|---|
//! | [`domain`] | event types and their versions |
//! | [`schema`] | which schemas are accepted, what they accept, and what their checks may cost |
//! | [`cache`] | the catalogues of a process, as ingest and fan-out use them |
//! | [`page`] | the catalogue as a page to read |
//!
//! Events that are posted over HTTP are checked before they are accepted, and those that are posted in SQL before they are
//! fanned out. A change is answered when it holds everywhere: processes use what they have loaded for at most
//! [`cache::VALID_TIME`] without asking the database, which is how long the response to a change waits.

pub(crate) mod cache;
mod domain;
pub(crate) mod flow;
pub(crate) mod http;
mod page;
pub(crate) mod schema;
pub(crate) mod store;
mod view;
