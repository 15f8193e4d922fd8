//! Building blocks that all crates of the workspace share: the HTTP server and its conventions, authentication,
//! settings, telemetry, and background workers.
//!
//! Nothing here knows a domain term, a table or a broker. The modules, in reading order:
//!
//! - [`problem`]: the format of all error responses (RFC 9457).
//! - [`extract`]: extractors for JSON bodies, paths and queries, which reject with problems. [`field`]: checks of the
//!   fields of a body. [`instant`]: checks of times. `body_budget`: the memory of request bodies. `parse_error`: errors
//!   of serde in plain words.
//! - [`serve`]: the HTTP/1.1 server, with bounds and a graceful stop. [`client_address`]: the address of a client, also behind
//!   proxies. [`network`]: networks in settings.
//! - [`web`]: the layers around every route: trace, metrics, time limit, panics, unknown routes.
//! - [`auth`]: authenticates callers by API key or JWT; their roles and tenants. [`limit`]: rate limits.
//! - [`idempotency`]: `Idempotency-Key` and the identity of a request. [`page`]: pagination with signed cursors.
//!   [`etag`]: versions of resources. [`event_stream`]: server-sent events. [`openapi`]: the common parts of the API description.
//! - [`batch`]: combines concurrent requests into batches. [`worker`]: the loop of background workers.
//!   [`backoff`]: pauses between attempts. [`gates`]: how many tasks may work on the same key. [`caller_share`]: how many connections one
//!   caller may use. [`deadline`]: time limits of steps that wait for a server. [`boot_time`]: a clock that nothing stops.
//! - [`config`]: loads settings. [`duration`]: durations as text. [`secret`]: secrets, key derivation and encryption. [`clock`]: the
//!   time as a parameter. [`health`]: the state of dependencies and tasks. [`telemetry`]: logs, metrics and traces. [`trace`]: W3C
//!   trace context.

pub mod auth;
pub mod backoff;
pub mod batch;
mod body_budget;
pub mod boot_time;
pub mod caller_share;
pub mod client_address;
pub mod clock;
pub mod config;
pub mod deadline;
pub mod duration;
pub mod etag;
pub mod event_stream;
pub mod extract;
pub mod field;
pub mod gates;
pub mod health;
pub mod idempotency;
pub mod instant;
pub mod json;
pub mod limit;
pub mod network;
pub mod openapi;
pub mod page;
mod parse_error;
pub mod problem;
pub mod secret;
pub mod serve;
pub mod telemetry;
pub mod trace;
pub mod web;
pub mod worker;
