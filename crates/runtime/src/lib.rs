//! What a process needs whatever it does: the time, background work, and time limits; and by feature its settings, its
//! secrets and its telemetry.
//!
//! Nothing here knows HTTP requests, SQL or a term of a service.
//!
//! - [`worker`]: the loop of background workers. [`health`]: the state of dependencies and tasks. [`backoff`]: pauses between
//!   attempts. [`deadline`]: time limits of steps that wait for a server.
//! - [`batch`]: combines concurrent requests into batches.
//! - [`clock`]: the time as a parameter. [`boot_time`]: a clock that nothing stops. [`duration`]: durations as text.
//! - [`trace`]: W3C trace context. [`json`]: how deep JSON is nested. [`parse_error`]: errors of serde in plain words.
//! - Feature `settings`: `config` loads settings; `network` is a network in settings.
//! - Feature `secrets`: `secret` has secrets, key derivation and encryption.
//! - Feature `work-pool`: `work_pool` is for work that occupies a core.
//! - Feature `telemetry`: `telemetry` starts logs, metrics and the export of traces.

pub mod backoff;
pub mod batch;
pub mod boot_time;
pub mod clock;
#[cfg(feature = "settings")]
pub mod config;
pub mod deadline;
pub mod duration;
pub mod health;
pub mod json;
#[cfg(feature = "settings")]
pub mod network;
pub mod parse_error;
#[cfg(feature = "secrets")]
pub mod secret;
#[cfg(feature = "telemetry")]
pub mod telemetry;
pub mod trace;
#[cfg(feature = "work-pool")]
pub mod work_pool;
pub mod worker;

/// The name of a metric and its help text, as `/metrics` shows them.
pub type MetricHelp = (&'static str, &'static str);

/// The metrics of this crate, with their help texts.
pub const METRICS: &[MetricHelp] =
    &[("pillarbox_worker_failures_total", "Failed rounds of a background worker; each is retried.")];
