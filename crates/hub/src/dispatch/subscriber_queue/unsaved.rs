//! What a subscriber queue knows and the database does not have yet.

use chrono::{DateTime, Utc};

use super::SubscriberQueue;
use super::lanes::DetachedLane;
use crate::delivery::{Attempt, Changes, LaneRow, NewDeadLetter};

/// The minimum time between two saves of a position. After a crash, the stored attempts tell the rest.
const POSITION_SAVE_PAUSE: chrono::Duration = chrono::Duration::milliseconds(250);
/// The minimum time between two saves of the head of a lane that makes progress without failures.
const LANE_SAVE_PAUSE: chrono::Duration = chrono::Duration::milliseconds(1_000);

#[derive(Debug)]
pub(super) struct UnsavedChanges {
    pub(super) attempts: Vec<Attempt>,
    pub(super) dead_letters: Vec<NewDeadLetter>,
    saved_position: i64,
    /// When a position was considered for saving for the last time.
    saved_at: DateTime<Utc>,
}

impl UnsavedChanges {
    pub(super) fn new(position: i64, now: DateTime<Utc>) -> UnsavedChanges {
        UnsavedChanges { attempts: Vec::new(), dead_letters: Vec::new(), saved_position: position, saved_at: now }
    }

    pub(super) fn has_outcomes(&self) -> bool {
        !self.attempts.is_empty() || !self.dead_letters.is_empty()
    }
}

impl SubscriberQueue {
    /// All messages up to this number have a final outcome, or belong to a detached lane.
    fn position(&self) -> i64 {
        self.lanes.first_pending().map_or(self.progress.read_to, |first| first - 1)
    }

    /// Whether the message may still be sent: it is beyond the position.
    pub(super) fn is_beyond_position(&self, n: i64) -> bool {
        n > self.position()
    }

    /// Moves the changes that are due into `changes`. The queue then regards them as saved: if the save fails for good, the
    /// dispatcher resets and loads the queue again.
    pub(in crate::dispatch) fn drain_changes(&mut self, now: DateTime<Utc>, changes: &mut Changes) {
        let subscriber = self.recipient.id;
        changes.attempts.append(&mut self.unsaved.attempts);
        changes.dead_letters.append(&mut self.unsaved.dead_letters);
        changes.executed_commands.append(&mut self.commands.executed);
        changes.rejected_retries.extend(self.commands.rejected_retries.drain(..).map(|n| (subscriber, n)));
        changes.deleted_lanes.extend(self.lanes.drain_deleted_rows().map(|head| (subscriber, head)));
        if self.answered_gone && self.recipient.is_open {
            changes.gone_subscribers.push((subscriber, self.recipient.version));
        }
        let mut has_new_row = false;
        self.lanes.save_dirty(now, |lane, row| {
            if only_head_moved(lane, &row, now) {
                return false;
            }
            has_new_row |= lane.saved.is_none();
            if lane.saved.as_ref() != Some(&row) {
                changes.deleted_lanes.extend(lane.saved.take().map(|saved| (subscriber, saved.head)));
                lane.saved = Some(row.clone());
                lane.saved_at = Some(now);
                changes.saved_lanes.push((subscriber, row));
            }
            true
        });
        if !has_new_row && now - self.unsaved.saved_at < POSITION_SAVE_PAUSE {
            return;
        }
        self.unsaved.saved_at = now;
        let position = self.position();
        // The row of a newly detached lane and the position that moves past its messages are saved together.
        if position > self.unsaved.saved_position {
            self.unsaved.saved_position = position;
            changes.positions.push((subscriber, position));
        }
    }

    /// When the next rate-limited change (position or lane head) is due to be saved. None if there is none.
    pub(super) fn next_save(&self) -> Option<DateTime<Utc>> {
        let has_changes = self.lanes.is_dirty() || self.position() > self.unsaved.saved_position;
        has_changes.then(|| self.unsaved.saved_at + POSITION_SAVE_PAUSE)
    }

    /// Whether there are changes to save now.
    pub(in crate::dispatch) fn has_changes(&self, now: DateTime<Utc>) -> bool {
        self.unsaved.has_outcomes()
            || self.lanes.has_deleted_rows()
            || !self.commands.executed.is_empty()
            || self.next_save().is_some_and(|at| at <= now)
    }
}

/// Whether the saved row is recent and differs from the new one only by the head of a lane without failures. Such a row is
/// saved seldom: after a crash, the stored attempts tell which messages behind the saved head are completed.
fn only_head_moved(lane: &DetachedLane, row: &LaneRow, now: DateTime<Utc>) -> bool {
    let is_healthy = |row: &LaneRow| row.attempts == 0 && row.next_at.is_some() && !row.manual_retry;
    lane.saved.as_ref().is_some_and(|saved| is_healthy(saved) && is_healthy(row))
        && lane.saved_at.is_some_and(|at| now - at < LANE_SAVE_PAUSE)
}
