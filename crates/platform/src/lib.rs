//! The binary `pillarbox`: it puts the parts together and owns nothing of what they do.
//!
//! - [`settings`]: every setting there is. `cli`: the commands.
//! - [`app`]: dependencies, router, workers; from settings to a running server and back down.
//! - `embedded`: a private PostgreSQL under the data folder. [`data_dir`]: that folder, its lock and its secret.
//! - [`keys`]: API keys (schema `pillarbox_platform`).
//! - `operator`: the log, its consumers, parked messages and dead letters, for operators.
//! - `edges`: health, readiness, metrics, the API's description.

pub mod app;
mod checks;
pub mod cli;
pub mod data_dir;
mod edges;
mod embedded;
pub mod keys;
mod operator;
mod services;
pub mod settings;

pub use cli::run;
