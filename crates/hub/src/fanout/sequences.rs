//! The sequence numbers that fan-out gives to the messages of each lane.

use std::collections::HashMap;

use pillarbox::database::Incarnation;
use sqlx::PgConnection;
use uuid::Uuid;

use super::store;
use crate::deliveries::message::without_replay;
use crate::fanout::store::NewMessage;

/// Bounds the lanes whose newest sequence number is cached.
pub(super) const CACHED_LANES_MAX: usize = 100_000;

/// The newest sequence number of each lane, valid as long as `newest` is the newest hub message of the same incarnation of
/// the database.
#[derive(Default)]
pub(super) struct LaneSequences {
    by_lane: HashMap<(Uuid, String), i64>,
    incarnation: Option<Incarnation>,
    /// [`UNCOMMITTED`] while a transaction is open.
    newest: i64,
}

/// Sentinel: the cached sequence numbers include a transaction that is not committed. If it fails, they must not be used.
const UNCOMMITTED: i64 = -1;

impl LaneSequences {
    /// Drops the cache if another process has created hub messages, if the numbers may be those of lost messages, or if
    /// the cache is too large.
    pub(super) fn validate(&mut self, newest: i64, incarnation: Option<Incarnation>) {
        let is_current = newest == self.newest && incarnation == self.incarnation;
        if !is_current || self.by_lane.len() > CACHED_LANES_MAX {
            self.by_lane.clear();
            (self.newest, self.incarnation) = (newest, incarnation);
        }
    }

    /// The numbers of the last batch are committed; `newest` is its last hub message.
    pub(super) fn commit(&mut self, newest: i64) {
        self.newest = newest;
    }

    /// Gives each message of a lane the next sequence number there. Returns the number of the newest hub message before
    /// this batch.
    pub(super) async fn assign(&mut self, tx: &mut PgConnection, messages: &mut [NewMessage]) -> sqlx::Result<i64> {
        let after = std::mem::replace(&mut self.newest, UNCOMMITTED);
        // The lanes of a replay have no numbers.
        let lane_of = |message: &NewMessage| {
            let lane = message.lane.as_ref().filter(|lane| without_replay(lane, message.replay).is_none())?;
            Some((message.subscriber, lane.clone()))
        };
        let mut unknown: Vec<(Uuid, String)> =
            messages.iter().filter_map(lane_of).filter(|lane| !self.by_lane.contains_key(lane)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if !unknown.is_empty() {
            let newest = store::newest_sequences(tx, &unknown).await?;
            self.by_lane.extend(unknown.into_iter().zip(newest));
        }
        for message in messages {
            if let Some(seq) = lane_of(message).and_then(|lane| self.by_lane.get_mut(&lane)) {
                *seq += 1;
                message.seq = Some(*seq);
            }
        }
        Ok(after)
    }
}
