//! What subscriber queues change, until it is saved.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::deliveries::attempt_result::Attempt;
use crate::deliveries::domain::Reason;
use crate::deliveries::message::HubMessage;
use crate::deliveries::recipient::Recipient;
use crate::health::counts::HealthChanges;

/// A message that was given up, to be stored.
#[derive(Debug)]
pub(crate) struct NewDeadLetter {
    pub(crate) recipient: Arc<Recipient>,
    pub(crate) message: HubMessage,
    pub(crate) reason: Reason,
    pub(crate) detail: String,
    pub(crate) attempts: u16,
    pub(crate) at: DateTime<Utc>,
}

/// A subscriber whose breaker has closed, to be reported.
#[derive(Debug)]
pub(crate) struct Recovery {
    pub(crate) recipient: Arc<Recipient>,
    /// When the first of the failures happened, as far as this dispatcher knows.
    pub(crate) failing_since: Option<DateTime<Utc>>,
    pub(crate) at: DateTime<Utc>,
}

/// The database row of a detached lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LaneRow {
    /// The next message of the lane, or the last completed one while the next is not read yet. All earlier ones of the lane
    /// have a final outcome.
    pub(crate) head: i64,
    pub(crate) lane: Option<Arc<str>>,
    pub(crate) attempts: u16,
    /// None: the lane is blocked.
    pub(crate) next_at: Option<DateTime<Utc>>,
    /// The head is a dead letter that an operator retries.
    pub(crate) manual_retry: bool,
}

/// The changes of many subscriber queues, saved in one transaction.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) dead_letters: Vec<NewDeadLetter>,
    /// Subscriber and new position.
    pub(crate) positions: Vec<(Uuid, i64)>,
    /// Lane rows to delete: subscriber and head.
    pub(crate) deleted_lanes: Vec<(Uuid, i64)>,
    pub(crate) saved_lanes: Vec<(Uuid, LaneRow)>,
    /// Subscribers to switch off, each with the version that answered and the status.
    pub(crate) gone_subscribers: Vec<(Uuid, i64, u16)>,
    /// Ids of operator commands that were executed.
    pub(crate) executed_commands: Vec<i64>,
    /// Dead letters, by subscriber and message, whose retry came too late and did not happen.
    pub(crate) rejected_retries: Vec<(Uuid, i64)>,
    pub(crate) recoveries: Vec<Recovery>,
    pub(crate) health: HealthChanges,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        // Exhaustive, so that a new field cannot be left out.
        let Changes {
            attempts,
            dead_letters,
            positions,
            deleted_lanes,
            saved_lanes,
            gone_subscribers,
            executed_commands,
            rejected_retries,
            recoveries,
            health,
        } = self;
        attempts.is_empty()
            && dead_letters.is_empty()
            && positions.is_empty()
            && deleted_lanes.is_empty()
            && saved_lanes.is_empty()
            && gone_subscribers.is_empty()
            && executed_commands.is_empty()
            && rejected_retries.is_empty()
            && recoveries.is_empty()
            && health.is_empty()
    }
}
