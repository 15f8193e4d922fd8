//! Messages of the progress service. The key of a message is the id of its project.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// The source of these messages.
pub const SOURCE: &str = "progress";

/// All items of a project are done. Posted once for each project.
pub const JOB_COMPLETED: &str = "job.completed";

/// The payload of `job.completed`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobCompleted {
    pub project_id: String,
    pub total: i64,
    pub done: i64,
    /// How many of the done items have failed.
    pub errors: i64,
    pub completed_at: DateTime<Utc>,
}
