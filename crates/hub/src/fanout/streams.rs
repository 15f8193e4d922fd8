//! The stream messages of a fan-out batch: their numbers within lanes.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use pillarbox::database::Incarnation;
use sqlx::PgConnection;
use uuid::Uuid;

use super::sequences::CACHED_LANES_MAX;
use crate::streams;
use crate::streams::store::messages::NewStreamMessage;

/// The newest sequence number of each lane of the streams, valid as long as `newest` is the newest stream message of the same
/// incarnation of the database. Without streams it is never used, and costs nothing.
#[derive(Default)]
pub(super) struct StreamSequences {
    by_lane: HashMap<(Uuid, String), i64>,
    incarnation: Option<Incarnation>,
    newest: i64,
    /// The newest stream message when the open transaction commits. If it fails, the cache must not be used.
    uncommitted: Option<i64>,
}

impl StreamSequences {
    /// Numbers and appends the messages. Returns their streams.
    pub(super) async fn append(
        &mut self,
        tx: &mut PgConnection,
        mut messages: Vec<NewStreamMessage>,
        incarnation: Option<Incarnation>,
        now: DateTime<Utc>,
    ) -> sqlx::Result<Vec<Uuid>> {
        if self.uncommitted.take().is_some() {
            self.by_lane.clear();
        }
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let newest = streams::store::messages::newest(tx).await?;
        let is_current = newest == self.newest && incarnation == self.incarnation;
        if !is_current || self.by_lane.len() > CACHED_LANES_MAX {
            self.by_lane.clear();
            (self.newest, self.incarnation) = (newest, incarnation);
        }
        self.uncommitted = Some(newest + messages.len() as i64);
        self.assign(tx, &mut messages).await?;
        let mut streams: Vec<Uuid> = messages.iter().map(|message| message.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        streams::store::messages::append(tx, newest, &messages, &streams, now).await?;
        Ok(streams)
    }

    /// The transaction of the last [`append`](StreamSequences::append) has committed.
    pub(super) fn commit(&mut self) {
        if let Some(newest) = self.uncommitted.take() {
            self.newest = newest;
        }
    }

    /// Gives each message of a lane the next sequence number there.
    async fn assign(&mut self, tx: &mut PgConnection, messages: &mut [NewStreamMessage]) -> sqlx::Result<()> {
        let lane_of = |message: &NewStreamMessage| message.lane.clone().map(|lane| (message.stream, lane));
        let mut unknown: Vec<(Uuid, String)> =
            messages.iter().filter_map(lane_of).filter(|lane| !self.by_lane.contains_key(lane)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if !unknown.is_empty() {
            let newest = streams::store::messages::newest_sequences(tx, &unknown).await?;
            self.by_lane.extend(unknown.into_iter().zip(newest));
        }
        for message in messages {
            if let Some(seq) = lane_of(message).and_then(|lane| self.by_lane.get_mut(&lane)) {
                *seq += 1;
                message.seq = Some(*seq);
            }
        }
        Ok(())
    }
}
