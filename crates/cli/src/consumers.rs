//! The consumers of the log, for the commands that list or change them.

use std::time::Instant;

use chrono::{DateTime, Utc};
use pillarbox::database::time::check_difference;
use runtime::clock::difference;
use serde_json::Value;

use crate::Failure;
use crate::api::Api;

pub(crate) const PATH: &str = "/admin/v1/consumers";

/// Selects parked messages or replays.
#[derive(clap::Args)]
pub struct ConsumerFilter {
    /// Only those of this consumer
    #[arg(long, value_name = "NAME")]
    pub(crate) consumer: Option<String>,
}

/// All consumers with their lag, workers and failures.
pub(crate) async fn load(api: &Api) -> Result<Vec<Value>, Failure> {
    match api.get(PATH).await?["items"].take() {
        Value::Array(consumers) => Ok(consumers),
        _ => Ok(Vec::new()),
    }
}

/// As [`load`]. Fails when the clock of this machine differs from the database's: a time that the operator gave relative to now
/// would be another one for the database.
pub(crate) async fn load_in_time(api: &Api) -> Result<Vec<Value>, Failure> {
    let (sent_at, started) = (Utc::now(), Instant::now());
    let consumers = load(api).await?;
    let measured_at = consumers.first().and_then(|consumer| consumer["measured_at"].as_str());
    let measured_at: Option<DateTime<Utc>> = measured_at.and_then(|at| at.parse().ok());
    if let Some(measured_at) = measured_at {
        let ahead = difference(sent_at, started.elapsed(), measured_at);
        check_difference(ahead).map_err(|differs| Failure::Other(differs.to_string()))?;
    }
    Ok(consumers)
}
