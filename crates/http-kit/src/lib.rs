//! What every HTTP API of ours shares: the server and its conventions, authentication, and limits.
//!
//! The crate knows no service and no broker, and of the database only the problems of its errors and the shares of callers in its
//! connections. Every API authenticates the same callers, so `auth` defines them all: users, API keys with the roles `ingest`,
//! `manage` and `admin`, portal tokens, and the tenant that a request acts for. What a role allows is decided by the routes of the
//! services. The modules, in reading order:
//!
//! - [`problem`]: the format of all error responses (RFC 9457). [`database`]: the problems of database errors.
//! - [`extract`]: extractors for JSON bodies, paths and queries, which reject with problems. [`field`]: checks of the
//!   fields of a body. [`instant`]: checks of times. [`shown_text`]: texts that are shown to others.
//! - [`serve`]: the HTTP/1.1 server, with bounds and a graceful stop. [`client_address`]: the address of a client, also behind
//!   proxies.
//! - [`web`]: the layers around every route: trace, metrics, time limit, panics, unknown routes.
//! - [`auth`]: authenticates callers by API key or JWT; their roles and tenants.
//! - [`idempotency`]: `Idempotency-Key` and the identity of a request. [`page`]: pagination with signed cursors.
//!   [`etag`]: versions of resources. [`event_stream`]: server-sent events. [`openapi`]: the common parts of the API description.
//! - [`admission`]: what one caller is, and how callers share everything that is limited.

use runtime::MetricHelp;

pub mod admission;
pub mod auth;
mod caller;
pub mod client_address;
pub mod database;
pub mod etag;
pub mod event_stream;
pub mod extract;
pub mod field;
mod header;
pub mod idempotency;
pub mod instant;
pub mod openapi;
pub mod page;
pub mod problem;
pub mod serve;
pub mod shown_text;
pub mod web;

/// The metrics of this crate, with their help texts for `/metrics`.
pub const METRICS: &[MetricHelp] = &[
    ("pillarbox_http_requests_total", "HTTP requests by method, route and status."),
    ("pillarbox_http_request_duration_seconds", "Time from the head of a request to the start of its response."),
];
