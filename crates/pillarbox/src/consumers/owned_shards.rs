//! The in-memory state of the shards that a shard worker owns. All of it can be loaded again from the database.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Instant;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use super::outcomes::KeyState;
use super::parked_messages::{self, Key};
use super::positions;
use super::processor::{Delivery, Origin};
use super::replay_reader::{self, ReplayShard};
use crate::log::{Position, Reader};

pub(super) struct OwnedShards {
    pub(super) reader: Reader,
    /// The positions that are stored in the database.
    saved: BTreeMap<i16, Position>,
    pub(super) saved_at: Instant,
    /// Keys with parked messages, by shard.
    blocked: HashMap<i16, HashSet<Key>>,
    /// When the next parked message is due.
    pub(super) parked_due: Option<DateTime<Utc>>,
    /// Unfinished replays, oldest first.
    pub(super) replays: Vec<ReplayShard>,
}

impl OwnedShards {
    /// Starts without any shard. The reader must have none, either.
    pub(super) fn new(reader: Reader) -> OwnedShards {
        OwnedShards {
            reader,
            saved: BTreeMap::new(),
            saved_at: Instant::now(),
            blocked: HashMap::new(),
            parked_due: None,
            replays: Vec::new(),
        }
    }

    /// Drops all shards.
    pub(super) fn reset(&mut self, reader: Reader) {
        *self = OwnedShards { saved_at: self.saved_at, ..OwnedShards::new(reader) };
    }

    pub(super) fn is_empty(&self) -> bool {
        self.saved.is_empty()
    }

    pub(super) fn numbers(&self) -> Vec<i16> {
        self.saved.keys().copied().collect()
    }

    /// The stored position of a shard; None if the shard is not owned.
    pub(super) fn saved_position(&self, shard: i16) -> Option<&Position> {
        self.saved.get(&shard)
    }

    /// Drops the shards that are no longer owned and loads the state of new ones.
    pub(super) async fn update(
        &mut self,
        db: &mut PgConnection,
        consumer: &str,
        owned: BTreeSet<i16>,
    ) -> sqlx::Result<()> {
        let before: BTreeSet<i16> = self.saved.keys().copied().collect();
        for shard in before.difference(&owned) {
            self.reader.remove(*shard);
            self.saved.remove(shard);
            self.blocked.remove(shard);
        }
        let new: Vec<i16> = owned.difference(&before).copied().collect();
        if !new.is_empty() {
            for (shard, position) in positions::load(db, consumer, &new).await? {
                self.reader.insert(shard, position.clone());
                self.saved.insert(shard, position);
            }
            for (shard, key) in parked_messages::blocked_keys(db, consumer, &new).await? {
                self.blocked.entry(shard).or_default().insert(key);
            }
        }
        let owned: Vec<i16> = owned.into_iter().collect();
        self.parked_due = parked_messages::next_due(db, consumer, &owned).await?;
        self.replays = replay_reader::unfinished(db, consumer, &owned).await?;
        Ok(())
    }

    pub(super) fn has_unsaved_positions(&self) -> bool {
        self.reader.positions().iter().any(|(shard, position)| self.saved.get(shard) != Some(position))
    }

    /// Returns the positions of the reader that differ from the stored ones.
    pub(super) fn unsaved_positions(&self) -> BTreeMap<i16, Position> {
        let is_unsaved = |(shard, position): &(&i16, &Position)| self.saved.get(*shard) != Some(*position);
        let unsaved = self.reader.positions().iter().filter(is_unsaved);
        unsaved.map(|(shard, position)| (*shard, position.clone())).collect()
    }

    /// Applies what a batch has committed.
    pub(super) fn apply(
        &mut self,
        positions: BTreeMap<i16, Position>,
        keys: Vec<KeyState>,
        next_due: Option<DateTime<Utc>>,
    ) {
        self.saved.extend(positions);
        self.saved_at = Instant::now();
        for KeyState { shard, key, is_blocked } in keys {
            let blocked = self.blocked.entry(shard).or_default();
            if is_blocked {
                blocked.insert(key);
            } else {
                blocked.remove(&key);
            }
        }
        self.parked_due = [self.parked_due, next_due].into_iter().flatten().min();
    }

    /// Whether the message may be processed now: no earlier message of its key is parked, and no operator discarded it.
    pub(super) fn is_ready(&self, delivery: &Delivery) -> bool {
        match delivery.origin {
            Origin::Parked { discarded, .. } => !discarded,
            Origin::Log => match (delivery.message.ordering_key(), self.blocked.get(&delivery.message.shard)) {
                (Some(key), Some(blocked)) => !blocked.contains(&key),
                (None, _) | (_, None) => true,
            },
        }
    }
}
