//! The consumers of the log with their state.

use chrono::{DateTime, Utc};
use pillarbox::operations::status::{self, ConsumerStatus};
use runtime::health::{Kind, State};
use serde::{Deserialize, Serialize};
use sqlx::PgExecutor;
use utoipa::ToSchema;

/// A consumer with a larger lag is behind. The alert in the runbook uses the same number.
pub const BEHIND_SECONDS: f64 = 60.0;

/// The kind of `hub.fanout`, which runs in a separate process. For the log it is a handler.
const FAN_OUT_KIND: &str = "fan-out";

/// A consumer with its state.
#[derive(Debug, Serialize)]
pub struct ConsumerView {
    pub state: ConsumerState,
    #[serde(flatten)]
    pub status: ConsumerStatus,
}

/// The state of a consumer. If several apply, it is the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConsumerState {
    Healthy,
    /// It has parked messages.
    Parked,
    /// Its oldest unread message is more than a minute old.
    Behind,
    /// Its shard worker fails and retries.
    Stalled,
    /// No process runs it.
    NoWorker,
    /// It was behind for too long, and an operator must reset or drop it.
    Lapsed,
}

/// How a [`ConsumerView`] looks in the OpenAPI document.
#[derive(Serialize, ToSchema)]
#[schema(as = ConsumerStatus)]
pub(crate) struct ConsumerSchema {
    state: ConsumerState,
    #[schema(example = "relay.default")]
    consumer: String,
    /// `relay` publishes to the broker, `handler` acts in this database.
    kind: String,
    /// The consumer has read all messages of the log up to this id.
    read_to: i64,
    /// The age of the oldest unread message; 0 if there is none.
    lag_seconds: f64,
    /// When the lag was measured, by the database's clock.
    measured_at: DateTime<Utc>,
    /// The number of unread messages of the log, whether they match the consumer's filter or not.
    lag_messages: i64,
    parked: i64,
    dead: i64,
    /// The number of messages that a route published and no queue took; counted up to 1,000.
    unrouted: i64,
    /// The number of unfinished replays.
    replays: i64,
    /// The processes that work for the consumer, with the number of shards that each one owns.
    workers: Vec<crate::schemas::WorkerStatus>,
    /// When the consumer lapsed because it was too far behind. It needs `cursors reset` or `cursors drop`.
    #[serde(skip_serializing_if = "Option::is_none")]
    lapsed_at: Option<DateTime<Utc>>,
}

impl ConsumerView {
    pub fn is_behind(&self) -> bool {
        self.status.lag_seconds > BEHIND_SECONDS
    }

    /// Whether an operator should act. Parked messages are retried, and a consumer without lag needs no process.
    pub fn needs_attention(&self) -> bool {
        self.is_behind() || matches!(self.state, ConsumerState::Lapsed | ConsumerState::Stalled)
    }
}

/// Returns the status of every consumer as operators see it.
pub async fn consumers(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<ConsumerStatus>> {
    let mut consumers = status::consumers(db).await?;
    for fan_out in consumers.iter_mut().filter(|status| status.consumer == hub::FAN_OUT) {
        fan_out.kind = FAN_OUT_KIND.to_owned();
    }
    Ok(consumers)
}

/// As [`consumers`], with the state of each. `checks` are those of a running server; they show which consumers stall.
pub async fn consumers_with_state(db: impl PgExecutor<'_>, checks: &[State]) -> sqlx::Result<Vec<ConsumerView>> {
    let consumers = consumers(db).await?;
    Ok(consumers.into_iter().map(|status| ConsumerView { state: state(&status, checks), status }).collect())
}

fn state(status: &ConsumerStatus, checks: &[State]) -> ConsumerState {
    let is_of_consumer = |check: &State| check.name.split_once('/').is_some_and(|(name, _)| name == status.consumer);
    let is_stalled = || checks.iter().any(|check| !check.up && check.kind == Kind::Task && is_of_consumer(check));
    if status.lapsed_at.is_some() {
        ConsumerState::Lapsed
    } else if status.workers.is_empty() {
        ConsumerState::NoWorker
    } else if is_stalled() {
        ConsumerState::Stalled
    } else if status.lag_seconds > BEHIND_SECONDS {
        ConsumerState::Behind
    } else if status.parked > 0 {
        ConsumerState::Parked
    } else {
        ConsumerState::Healthy
    }
}
