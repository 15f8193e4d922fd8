//! The binary `pillarbox`: it combines the services into one program.
//!
//! - [`settings`]: all settings. `cli`: the commands.
//! - [`app`]: starts a process from its settings and stops it. `pools`: its database connections. `checks`: its health checks.
//! - `clock_check`: compares the clock of the process with the database's.
//! - [`services`]: the list of services. [`api`]: the router and the OpenAPI description.
//! - `embedded`: an embedded PostgreSQL in the data folder. [`data_dir`]: that folder, its lock and its secret key.
//! - [`keys`]: API keys (schema `pillarbox_platform`).
//! - `operator`: the operator API: the log, its consumers, parked messages, dead letters and replays.
//! - `server_routes`: health, readiness, metrics and the API documentation.

pub mod api;
pub mod app;
mod checks;
pub mod cli;
mod clock_check;
pub mod data_dir;
mod embedded;
pub mod keys;
mod operator;
mod pools;
mod server_routes;
pub mod services;
pub mod settings;

pub use cli::run;
