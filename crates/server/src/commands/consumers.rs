//! The consumers of the log with their state, for `cursors` and `status`.

use admin::operator::{self, BEHIND_SECONDS};
use cli::table;
use pillarbox::operations::status::ConsumerStatus;
use runtime::health::{Kind, State};
use serde::Serialize;
use sqlx::PgPool;
use strum::Display;

use super::Failure;

/// A consumer with its state.
#[derive(Serialize)]
pub(super) struct Consumer {
    pub(super) state: ConsumerState,
    #[serde(flatten)]
    pub(super) status: ConsumerStatus,
}

/// The state of a consumer. If several apply, it is the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(super) enum ConsumerState {
    Good,
    /// It has parked messages.
    Parked,
    /// Its oldest unread message is more than a minute old.
    Behind,
    /// Its shard worker fails and retries.
    Stalled,
    /// No process runs it.
    Nobody,
    /// It was behind for too long, and an operator must reset or drop it.
    Lapsed,
}

impl Consumer {
    pub(super) fn is_behind(&self) -> bool {
        self.status.lag_seconds > BEHIND_SECONDS
    }

    /// Whether an operator should act. Parked messages are retried, and a consumer without lag needs no process.
    pub(super) fn needs_attention(&self) -> bool {
        self.is_behind() || matches!(self.state, ConsumerState::Lapsed | ConsumerState::Stalled)
    }
}

/// Loads the consumers. `checks` are those of a running server; they show which consumers stall. Fails if the
/// database cannot be reached.
pub(super) async fn load_consumers(db: &PgPool, checks: &[State]) -> Result<Vec<Consumer>, Failure> {
    let is_stalled = |consumer: &str| {
        let of = |check: &State| check.name.split_once('/').is_some_and(|(name, _)| name == consumer);
        checks.iter().any(|check| !check.up && check.kind == Kind::Task && of(check))
    };
    let state = |status: &ConsumerStatus| match () {
        () if status.lapsed_at.is_some() => ConsumerState::Lapsed,
        () if status.workers.is_empty() => ConsumerState::Nobody,
        () if is_stalled(&status.consumer) => ConsumerState::Stalled,
        () if status.lag_seconds > BEHIND_SECONDS => ConsumerState::Behind,
        () if status.parked > 0 => ConsumerState::Parked,
        () => ConsumerState::Good,
    };
    let consumers = operator::consumers(db).await?;
    Ok(consumers.into_iter().map(|status| Consumer { state: state(&status), status }).collect())
}

/// Prints the consumers as a table.
pub(super) fn print(consumers: &[Consumer]) -> std::io::Result<()> {
    let row = |Consumer { state, status: consumer }: &Consumer| {
        let workers = consumer.workers.iter().map(|worker| format!("{} ({})", worker.name, worker.shards));
        [
            consumer.consumer.clone(),
            consumer.kind.clone(),
            format!("{:.1}", consumer.lag_seconds),
            consumer.lag_messages.to_string(),
            consumer.parked.to_string(),
            consumer.dead.to_string(),
            consumer.unrouted.to_string(),
            consumer.replays.to_string(),
            state.to_string(),
            match consumer.workers.is_empty() {
                true => "none".to_owned(),
                false => workers.collect::<Vec<_>>().join(", "),
            },
        ]
    };
    let rows: Vec<_> = consumers.iter().map(row).collect();
    let heads =
        ["CONSUMER", "KIND", "LAG_S", "LAG", "PARKED", "DEAD", "UNROUTED", "REPLAYS", "STATE", "WORKERS (SHARDS)"];
    table::print(heads, &rows)
}
