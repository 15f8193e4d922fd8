//! What is kept: everything that speaks to PostgreSQL below the services.
//!
//! - [`database`]: the pool that every role shares, and the one timeline of migrations.
//!
//! Nothing here knows HTTP or a broker.

pub mod database;
