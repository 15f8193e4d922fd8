//! The binary `pillarbox`: it combines the services into one program.
//!
//! - [`settings`]: all settings. `commands`: the command line, with the commands of the crate `cli`.
//! - [`app`]: starts a process from its settings and stops it. `start_error`: why it does not start. `pools`: its database connections.
//! - `checks`: its health checks. `message_bus`: RabbitMQ.
//! - `clock_check`: compares the clock of the process with the database's.
//! - [`services`]: the list of services. [`api`]: the router and the OpenAPI description.
//! - `embedded`: an embedded PostgreSQL in the data folder. [`data_dir`]: that folder, its lock and its secret key.
//! - [`console`]: the web console, whose files are part of the binary.
//! - `schemas`: types of other crates in the OpenAPI document. `server_routes`: health, readiness, metrics and the API documentation.

pub mod api;
pub mod app;
mod checks;
mod clock_check;
mod commands;
pub mod console;
pub mod data_dir;
mod embedded;
mod message_bus;
mod pools;
mod server_routes;
pub mod services;
pub mod settings;
mod start_error;

pub use commands::run;

use pillarbox::database::{MigrationId, Migrations};

/// All migrations of this program.
pub fn migrations() -> Migrations {
    services::migrations(services::SERVICES)
}

/// `pillarbox 1, pillarbox_hub 1`
fn list(migrations: &[MigrationId]) -> String {
    migrations.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
