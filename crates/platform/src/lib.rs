//! The binary `pillarbox`: it combines the services into one program.
//!
//! - [`settings`]: all settings. `cli`: the commands.
//! - [`app`]: starts a process from its settings and stops it. `pools`: its database connections. `checks`: its health checks.
//! - `clock_check`: compares the clock of the process with the database's.
//! - [`services`]: the list of services. [`api`]: the router and the OpenAPI description.
//! - `embedded`: an embedded PostgreSQL in the data folder. [`data_dir`]: that folder, its lock and its secret key.
//! - [`keys`]: API keys. `portal_tokens`: short-lived tokens of a tenant. [`audit`]: who acted for which tenant. `rate_exchange`:
//!   limits that processes share. (All in the schema `pillarbox_platform`.)
//! - [`tenants`]: the customers of the installation.
//! - `caller`: who the caller of a request is. `overview`: the installation at a glance.
//! - `operator`: the operator API: the log, its consumers, parked messages, dead letters and replays.
//! - [`console`]: the web console, whose files are part of the binary.
//! - `server_routes`: health, readiness, metrics and the API documentation.

pub mod api;
pub mod app;
pub mod audit;
mod caller;
mod checks;
pub mod cli;
mod clock_check;
pub mod console;
pub mod data_dir;
mod embedded;
pub mod keys;
mod operator;
mod overview;
mod pools;
mod portal_tokens;
mod rate_exchange;
mod server_routes;
pub mod services;
pub mod settings;
pub mod tenants;

pub use cli::run;
