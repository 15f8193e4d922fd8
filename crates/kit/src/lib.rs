//! What every part of Pillarbox needs and none owns.
//!
//! Nothing here knows a domain noun, a table or a broker: those live above. Read in this order:
//!
//! - [`problem`]: the one shape of every error answer (RFC 9457).
//! - [`extract`]: JSON bodies, paths and queries that reject as problems. [`field`]: what a body's fields are to be.
//! - [`serve`]: the HTTP/1.1 server: bounded, drains on stop, answers even what is not HTTP.
//! - [`web`]: the layers around every route: trace, metrics, panics, unknown routes.
//! - [`auth`]: who is calling: API keys and JWTs, roles and tenants. [`limit`]: how often they may.
//! - [`idempotency`]: one request told from another. [`page`]: opaque, tamper-evident page cursors.
//!   [`etag`]: a row's version.
//! - [`batch`]: one batch in flight, the next one gathers. [`worker`]: rounds, on a wake-up or by time.
//! - [`config`], [`secret`], [`clock`], [`health`], [`telemetry`], [`trace`], [`openapi`]: what the names say.

pub mod auth;
pub mod batch;
pub mod clock;
pub mod config;
pub mod etag;
pub mod extract;
pub mod field;
pub mod health;
pub mod idempotency;
pub mod instant;
pub mod limit;
pub mod openapi;
pub mod page;
pub mod problem;
pub mod secret;
pub mod serve;
pub mod telemetry;
pub mod trace;
pub mod web;
pub mod worker;
