//! Positions: how far a consumer has read one shard.

use crate::database::snapshot::Snapshot;

/// How far a consumer has read one shard: a window between two snapshots, and the last id that was read in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    pub(crate) old: Snapshot,
    pub(crate) new: Snapshot,
    /// The last id that was read within the window; 0 when a window is opened.
    pub(crate) last_id: i64,
}

impl Position {
    /// The position after everything that is visible in `snapshot`.
    pub(crate) fn after(snapshot: Snapshot) -> Position {
        Position { old: snapshot.clone(), new: snapshot, last_id: 0 }
    }

    /// Whether the window has been read to its end.
    pub(crate) fn is_done(&self) -> bool {
        self.old == self.new
    }
}
