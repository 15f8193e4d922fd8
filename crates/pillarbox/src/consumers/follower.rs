//! Reads again what a consumer that reads in the order of the log has read, and follows it until it has caught up.
//!
//! A follower never reads what its consumer has not read, so the two together miss nothing and repeat nothing: what
//! commits late is read by the consumer first. Like the consumer, it reads from snapshot to snapshot: its first window is the
//! history, from the beginning of the log to what the consumer had read before its own window; then it reads the windows in
//! between, whatever ids their messages have; and at last the part of the consumer's window that the consumer has read.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;

use super::positions;
use crate::database::{Incarnation, snapshot::Snapshot};
use crate::log::{Filter, Message, Position, Reader, SHARDS, time_search};

/// How far a follower has read, the same in all shards. It can be stored as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowerPosition {
    position: Position,
    /// It is within the history: its messages were visible when the follower began.
    is_history: bool,
}

/// The JSON of a position.
#[derive(Serialize, Deserialize)]
struct StoredPosition {
    old: StoredSnapshot,
    new: StoredSnapshot,
    last_id: i64,
    is_history: bool,
}

#[derive(Serialize, Deserialize)]
struct StoredSnapshot {
    id: i64,
    visible: String,
    at: DateTime<Utc>,
}

/// Reads the messages after a position, as far as its consumer has read them.
#[derive(Debug)]
pub struct LogFollower {
    reader: Reader,
    position: FollowerPosition,
}

impl FollowerPosition {
    /// What a consumer has read. None if its shards have different positions, which can be for a moment after an operator
    /// has moved it, or if it reads its shards independently.
    pub async fn of_consumer(db: &mut PgConnection, consumer: &str) -> sqlx::Result<Option<FollowerPosition>> {
        let shards: Vec<i16> = (0..SHARDS).collect();
        let positions: BTreeMap<i16, Position> = positions::load(db, consumer, &shards).await?;
        let mut positions = positions.into_values();
        let Some(first) = positions.next() else { return Ok(None) };
        let is_common = positions.all(|position| is_same(&position, &first));
        Ok(is_common.then_some(FollowerPosition { position: first, is_history: false }))
    }

    /// The start of a follower of a consumer that has read up to `leader`: before the first message that was posted at
    /// `from` or later. In a restored log, not before the first message that was posted after the restore.
    pub async fn since(
        db: &mut PgConnection,
        from: DateTime<Utc>,
        leader: &FollowerPosition,
    ) -> sqlx::Result<FollowerPosition> {
        let beginning = Snapshot::beginning(db).await?;
        let (first_id, _) = time_search::around(db, None, from - time_search::MARGIN).await?;
        let Position { old, new, .. } = &leader.position;
        let new = [old, new].into_iter().find(|snapshot| snapshot.is_after(&beginning));
        let position = match new {
            Some(new) => Position { old: beginning, new: new.clone(), last_id: (first_id - 1).max(0) },
            None => Position::after(beginning),
        };
        Ok(FollowerPosition { position, is_history: true })
    }

    /// No message that was posted before `to` has this id or a higher one. None: the log ends before `to`.
    pub async fn first_id_after(db: &mut PgConnection, to: DateTime<Utc>) -> sqlx::Result<Option<i64>> {
        let time = to + time_search::MARGIN;
        match time_search::newest_below(db, None, i64::MAX).await? {
            Some((_, at)) if at > time => Ok(Some(time_search::around(db, None, time).await?.1)),
            Some(_) | None => Ok(None),
        }
    }

    /// An id up to which messages were read, for showing the progress.
    pub fn approximate_id(&self) -> i64 {
        let Position { old, new, last_id } = &self.position;
        if is_same_snapshot(old, new) { new.id_before } else { old.id_before.max(*last_id) }
    }

    /// Whether the next messages belong to the history, which was visible when the follower began.
    pub fn is_history(&self) -> bool {
        self.is_history
    }

    /// Returns the position as it is stored.
    pub fn to_json(&self) -> serde_json::Value {
        let Position { old, new, last_id } = &self.position;
        let stored = |snapshot: &Snapshot| StoredSnapshot {
            id: snapshot.id_before,
            visible: snapshot.visible.clone(),
            at: snapshot.at,
        };
        let stored =
            StoredPosition { old: stored(old), new: stored(new), last_id: *last_id, is_history: self.is_history };
        serde_json::to_value(stored).unwrap_or_default()
    }

    /// The position that was stored, which has survived whatever has happened to the database: it is valid in the current
    /// incarnation. Fails if it is not the JSON of a position.
    pub async fn from_json(db: &mut PgConnection, json: serde_json::Value) -> sqlx::Result<FollowerPosition> {
        let stored: StoredPosition =
            serde_json::from_value(json).map_err(|error| sqlx::Error::Decode(error.to_string().into()))?;
        let incarnation = Incarnation::current(db).await?;
        let snapshot = |StoredSnapshot { id, visible, at }| Snapshot { id_before: id, visible, at, incarnation };
        let StoredPosition { old, new, last_id, is_history } = stored;
        Ok(FollowerPosition { position: Position { old: snapshot(old), new: snapshot(new), last_id }, is_history })
    }
}

impl LogFollower {
    /// Returns a follower that reads the matching messages from this position on.
    pub fn new(filter: Filter, position: FollowerPosition) -> LogFollower {
        LogFollower { reader: Reader::new(filter).in_log_order(), position }
    }

    /// Returns how far it has read.
    pub fn position(&self) -> &FollowerPosition {
        &self.position
    }

    /// Continues after the message before `id`, in the window of the last read.
    pub fn return_to(&mut self, read_from: &FollowerPosition, id: i64) {
        self.position = read_from.clone();
        self.position.position.last_id = id - 1;
    }

    /// Whether it has read everything that its consumer has read.
    pub fn has_reached(&self, leader: &FollowerPosition) -> bool {
        next_window(&self.position.position, &leader.position).is_none()
    }

    /// Reads the next messages and advances past them: about `limit` rows of the log, of which those that match are
    /// returned, in the order of their ids. Also returns the position before them, for [`LogFollower::return_to`].
    pub async fn read(
        &mut self,
        db: &mut PgConnection,
        leader: &FollowerPosition,
        limit: u32,
    ) -> sqlx::Result<(FollowerPosition, Vec<Message>)> {
        let Some((window, upto)) = next_window(&self.position.position, &leader.position) else {
            return Ok((self.position.clone(), Vec::new()));
        };
        let is_history = self.position.is_history && is_same_snapshot(&window.old, &self.position.position.old);
        let before = FollowerPosition { position: window.clone(), is_history };
        (0..SHARDS).for_each(|shard| self.reader.insert(shard, window.clone()));
        let mut messages = self.reader.read(db, limit).await?;
        let read_to = self.reader.positions().values().next().cloned().unwrap_or_else(|| window.clone());
        let position = match upto {
            // Its consumer has not read the rest of the window.
            Some(upto) if read_to.is_done() || read_to.last_id >= upto => {
                messages.retain(|message| message.id <= upto);
                Position { last_id: upto, ..window }
            }
            Some(_) | None => read_to,
        };
        self.position = FollowerPosition { is_history: is_history && !position.is_done(), position };
        Ok((before, messages))
    }
}

/// The window to read next, and the last id of it that the consumer has read; None: it has read the window to its end.
/// Returns None if the follower has reached its consumer.
fn next_window(at: &Position, leader: &Position) -> Option<(Position, Option<i64>)> {
    if !is_same_snapshot(&at.old, &at.new) {
        let is_same_window = is_same_snapshot(&at.old, &leader.old) && is_same_snapshot(&at.new, &leader.new);
        if !is_same_window {
            return Some((at.clone(), None));
        }
        return (at.last_id < leader.last_id).then(|| (at.clone(), Some(leader.last_id)));
    }
    // An operator may have moved the consumer back: then it reads the rest again itself.
    if !leader.new.is_after(&at.new) {
        return None;
    }
    let window = |new: &Snapshot| Position { old: at.new.clone(), new: new.clone(), last_id: 0 };
    if is_same_snapshot(&leader.old, &leader.new) {
        return Some((window(&leader.new), None));
    }
    if leader.old.is_after(&at.new) {
        return Some((window(&leader.old), None));
    }
    (leader.last_id > 0).then(|| (window(&leader.new), Some(leader.last_id)))
}

/// Whether both snapshots were taken at once. The incarnation does not count: a stored snapshot is valid in each.
fn is_same_snapshot(one: &Snapshot, other: &Snapshot) -> bool {
    one.visible == other.visible && one.id_before == other.id_before
}

fn is_same(one: &Position, other: &Position) -> bool {
    is_same_snapshot(&one.old, &other.old) && is_same_snapshot(&one.new, &other.new) && one.last_id == other.last_id
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn snapshot(xmax: i64) -> Snapshot {
        let (at, incarnation) = (DateTime::UNIX_EPOCH, Uuid::nil().into());
        Snapshot { id_before: xmax, visible: format!("1:{xmax}:"), at, incarnation }
    }

    fn position(old: i64, new: i64, last_id: i64) -> Position {
        Position { old: snapshot(old), new: snapshot(new), last_id }
    }

    #[test]
    fn a_follower_reads_window_by_window_up_to_its_consumer() {
        let leader = position(30, 40, 35);
        let steps = [
            (position(3, 30, 0), Some((position(3, 30, 0), None)), "the history first"),
            (position(20, 20, 0), Some((position(20, 30, 0), None)), "then up to the consumer's window"),
            (position(30, 30, 0), Some((position(30, 40, 0), Some(35))), "of that window what the consumer has read"),
            (position(30, 40, 34), Some((position(30, 40, 34), Some(35))), "and no more"),
            (position(30, 40, 35), None, "it has reached the consumer"),
            (position(50, 50, 0), None, "the consumer was moved back"),
        ];
        for (at, expected, why) in steps {
            assert_eq!(next_window(&at, &leader), expected, "{why}");
        }
        assert_eq!(next_window(&position(30, 30, 0), &position(30, 40, 0)), None, "nothing of its window is read");
        assert_eq!(next_window(&position(20, 20, 0), &position(40, 40, 0)), Some((position(20, 40, 0), None)));
    }
}
