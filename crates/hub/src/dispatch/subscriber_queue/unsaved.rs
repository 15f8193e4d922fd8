//! The changes of a subscriber queue that are not saved yet.

use chrono::{DateTime, Utc};

use super::lanes::DetachedLane;
use crate::deliveries::attempt_result::Attempt;
use crate::dispatch::changes::{LaneRow, NewDeadLetter, Recovery};

/// The minimum time between two saves of a position. After a crash, the stored attempts tell which messages beyond the
/// saved position have a final outcome.
pub(super) const POSITION_SAVE_PAUSE: chrono::Duration = chrono::Duration::milliseconds(250);
/// The minimum time between two saves of the head of a lane that makes progress without failures.
const LANE_SAVE_PAUSE: chrono::Duration = chrono::Duration::milliseconds(1_000);

#[derive(Debug)]
pub(super) struct UnsavedChanges {
    pub(super) attempts: Vec<Attempt>,
    pub(super) dead_letters: Vec<NewDeadLetter>,
    pub(super) recoveries: Vec<Recovery>,
    pub(super) saved_position: i64,
    /// When the position was last compared with the saved one; it was saved then if it had changed.
    pub(super) checked_at: DateTime<Utc>,
}

impl UnsavedChanges {
    pub(super) fn new(position: i64, now: DateTime<Utc>) -> UnsavedChanges {
        let (attempts, dead_letters, recoveries) = (Vec::new(), Vec::new(), Vec::new());
        UnsavedChanges { attempts, dead_letters, recoveries, saved_position: position, checked_at: now }
    }

    pub(super) fn has_outcomes(&self) -> bool {
        !self.attempts.is_empty() || !self.dead_letters.is_empty()
    }
}

/// Whether the saved row is recent and differs from the new one only by the head of a lane without failures. Such a row is
/// saved seldom: after a crash, the stored attempts tell which messages after the saved head are completed.
pub(super) fn only_head_moved(lane: &DetachedLane, row: &LaneRow, now: DateTime<Utc>) -> bool {
    let is_healthy = |row: &LaneRow| row.attempts == 0 && row.next_at.is_some() && !row.manual_retry;
    lane.saved.as_ref().is_some_and(|saved| is_healthy(saved) && is_healthy(row))
        && lane.saved_at.is_some_and(|at| now - at < LANE_SAVE_PAUSE)
}
