//! How the types of other crates that responses contain look in the OpenAPI document. Those crates do not know OpenAPI. The
//! tests that send generated requests compare every response with the document.

use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;

/// Whether an entry is a server or a background task.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CheckKind {
    Dependency,
    Task,
}

/// One dependency or task, as `/readyz` shows it.
#[derive(Serialize, ToSchema)]
pub struct ReadinessCheck {
    #[schema(example = "postgres")]
    name: String,
    kind: CheckKind,
    required: bool,
    up: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct WorkerStatus {
    #[schema(example = "web-1:4711")]
    name: String,
    shards: i64,
}

/// The status of one message for one consumer.
#[derive(Serialize, ToSchema)]
pub(crate) struct LogMessageStatus {
    #[schema(example = "relay.default")]
    consumer: String,
    /// `pending`, `sent`, `unrouted` (published, but no queue was bound for it), `parked`, `dead` or `discarded`.
    #[schema(example = "sent")]
    status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    sent_at: Option<DateTime<Utc>>,
    attempts: i32,
    /// When a parked message is retried. Absent if it waits for an earlier message of its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_retry_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
}

/// The result of a bulk operation.
#[derive(Serialize, ToSchema)]
pub(crate) struct BulkResult {
    /// How many dead letters it changed.
    count: u64,
    /// There may be more: repeat the request.
    more: bool,
}

/// A replay and its progress.
#[derive(Serialize, ToSchema)]
pub(crate) struct ConsumerReplay {
    id: i64,
    #[schema(example = "relay.default")]
    consumer: String,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    /// It repeats messages that have already taken effect.
    again: bool,
    requested_at: DateTime<Utc>,
    #[schema(example = 16)]
    shards: i16,
    shards_done: i64,
    /// When an operator canceled it. Messages that were replayed before are not undone.
    #[serde(skip_serializing_if = "Option::is_none")]
    canceled_at: Option<DateTime<Utc>>,
}
