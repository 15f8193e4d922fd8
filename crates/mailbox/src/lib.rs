//! What is kept: everything that speaks to PostgreSQL below the services.
//!
//! - [`database`]: the pool that every role shares, and the one timeline of migrations.
//! - [`idempotency`]: a repeated request is answered again, and does nothing more.
//! - [`post`]: a message, in the transaction that it tells of.
//! - [`log`]: reading what was posted, without missing or stalling. [`maintain`]: its partitions, made ahead.
//!
//! Owns the schema `pillarbox`: `log` and its partitions, `idempotency`. Nothing here knows a route or a broker.
//!
//! Invariants: a log row is never updated or deleted. A row takes its transaction id before its id. What is posted is
//! posted by [`post`] or by the SQL function of the same name, which set `source`; a caller cannot.

pub mod database;
pub mod idempotency;
pub mod log;
pub mod maintain;
pub mod post;
