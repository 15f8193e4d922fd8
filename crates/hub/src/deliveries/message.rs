//! Hub events and hub messages: the types that fan-out, dispatcher and store share.
//!
//! This module depends on none of the three, so that each of them can depend on it.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use pillarbox::log::{Message, Source};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::directory::domain::DirectoryVersion;

const HUB: &str = contracts::HUB_SOURCE;
/// The source of events that are posted to the hub.
pub(crate) const EVENT_SOURCE: Source = Source::new(HUB);
/// How the name of a lane of a replay begins.
const REPLAY_LANE: &str = "replay:";

/// The content of a hub event. All its hub messages share it.
#[derive(Debug)]
pub(crate) struct HubEvent {
    pub(crate) id: Uuid,
    /// `hub` if the event was posted to the hub, `sql` if it was posted in SQL, else the service that published it.
    pub(crate) source: Cow<'static, str>,
    pub(crate) topic: String,
    /// The ordering key with which the event was posted.
    pub(crate) key: Option<String>,
    pub(crate) at: DateTime<Utc>,
    pub(crate) payload: Bytes,
    pub(crate) traceparent: Option<String>,
    /// The headers that its producer has posted with it in SQL.
    pub(crate) headers: BTreeMap<String, String>,
}

/// A hub event as a dead letter stores it; [`EventView`](crate::events::view::EventView) is what callers see. The ordering key has its
/// own column.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EventSnapshot {
    pub(crate) event_id: Uuid,
    pub(crate) event_type: String,
    pub(crate) source: String,
    pub(crate) created_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, String>,
    pub(crate) payload: Box<RawValue>,
}

/// One hub event for one subscriber.
#[derive(Debug, Clone)]
pub(crate) struct HubMessage {
    /// The number of the message. Fan-out numbers all hub messages without a gap.
    pub(crate) n: i64,
    pub(crate) lane: Option<Arc<str>>,
    /// The number of the message within its lane, from 1.
    pub(crate) seq: Option<i64>,
    /// The attempts before an operator retried the message. The attempts of the retry are numbered after them.
    pub(crate) attempts_before: u16,
    /// The replay that has created the message.
    pub(crate) replay: Option<Uuid>,
    /// None if neither the log nor a dead letter has the content any more.
    pub(crate) event: Option<Arc<HubEvent>>,
}

/// Identifies a lane of a subscriber. A message without an ordering key is the only one of its lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum LaneKey {
    Named(Arc<str>),
    Single(i64),
}

/// The messages of one fan-out batch, for a dispatcher in the same process: all messages with numbers above `after`, up to
/// and including `to`.
pub(crate) struct FannedBatch {
    pub(crate) after: i64,
    pub(crate) to: i64,
    pub(crate) messages: HashMap<Uuid, Vec<HubMessage>>,
    /// The version of the directory that fan-out matched the events against. The numbers of the messages belong to its
    /// incarnation.
    pub(crate) directory_version: DirectoryVersion,
}

impl HubMessage {
    pub(crate) fn lane_key(&self) -> LaneKey {
        LaneKey::new(self.lane.clone(), self.n)
    }
}

/// The name of a lane of a replay. It differs from the name of each lane of live messages, so that neither waits for the
/// other.
pub(crate) fn replay_lane(replay: Uuid, lane: &str) -> String {
    format!("{REPLAY_LANE}{replay}:{lane}")
}

/// The name as callers know it, if it is a lane of this replay. The name alone does not tell: an ordering key can be any text,
/// so `replay` is that of the message.
pub(crate) fn without_replay(lane: &str, replay: Option<Uuid>) -> Option<&str> {
    let (id, name) = lane.strip_prefix(REPLAY_LANE)?.split_once(':')?;
    (replay? == id.parse::<Uuid>().ok()?).then_some(name)
}

/// The name of a lane as callers know it; `replay` is that of the message.
pub(crate) fn public_lane(lane: &str, replay: Option<Uuid>) -> &str {
    without_replay(lane, replay).unwrap_or(lane)
}

impl LaneKey {
    /// The key of the message `n` with this lane name.
    pub(crate) fn new(lane: Option<Arc<str>>, n: i64) -> LaneKey {
        lane.map_or(LaneKey::Single(n), LaneKey::Named)
    }

    /// None for a message without an ordering key.
    pub(crate) fn name(&self) -> Option<&Arc<str>> {
        match self {
            LaneKey::Named(name) => Some(name),
            LaneKey::Single(_) => None,
        }
    }
}

impl HubEvent {
    pub(crate) fn from_log(message: &Message) -> HubEvent {
        HubEvent {
            id: message.message_id,
            source: source_of(&message.source),
            topic: message.topic.clone(),
            key: message.key.clone(),
            at: message.at,
            payload: Bytes::copy_from_slice(message.payload.get().as_bytes()),
            traceparent: message.trace().map(|trace| trace.to_string()),
            headers: message.producer_headers(),
        }
    }

    pub(crate) fn from_snapshot(snapshot: EventSnapshot, key: Option<String>) -> HubEvent {
        HubEvent {
            id: snapshot.event_id,
            source: source_of(&snapshot.source),
            topic: snapshot.event_type,
            key,
            at: snapshot.created_at,
            payload: Bytes::copy_from_slice(snapshot.payload.get().as_bytes()),
            traceparent: snapshot.traceparent,
            headers: snapshot.headers,
        }
    }

    /// The JSON text of an [`EventSnapshot`], with the payload byte for byte as it was posted.
    pub(crate) fn snapshot(&self) -> String {
        let payload = std::str::from_utf8(&self.payload).unwrap_or("null");
        let snapshot = EventSnapshot {
            event_id: self.id,
            event_type: self.topic.clone(),
            source: self.source.clone().into_owned(),
            created_at: self.at,
            traceparent: self.traceparent.clone(),
            headers: self.headers.clone(),
            payload: RawValue::from_string(payload.to_owned()).unwrap_or_default(),
        };
        serde_json::to_string(&snapshot).unwrap_or_default()
    }
}

/// Without an allocation for events that were posted to the hub.
fn source_of(name: &str) -> Cow<'static, str> {
    match name {
        HUB => Cow::Borrowed(HUB),
        other => Cow::Owned(other.to_owned()),
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    pub(crate) fn event(payload_bytes: usize) -> HubEvent {
        let payload = vec![b'x'; payload_bytes].into();
        let (source, topic) = (HUB.into(), "t".to_owned());
        let (id, at) = (Uuid::nil(), DateTime::UNIX_EPOCH);
        HubEvent { id, source, topic, key: None, at, payload, traceparent: None, headers: BTreeMap::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lane_of_a_replay_differs_from_those_of_live_messages() {
        let replay = Uuid::now_v7();
        let lane = replay_lane(replay, "order:5");
        assert_eq!(without_replay(&lane, Some(replay)), Some("order:5"));
        assert_eq!(public_lane(&lane, Some(replay)), "order:5");
        for of in [None, Some(Uuid::now_v7())] {
            assert_eq!(
                (without_replay(&lane, of), public_lane(&lane, of)),
                (None, &*lane),
                "only its key looks like that"
            );
        }
        for live in ["order:5", "replay:order:5", "replay:", ""] {
            assert_eq!((without_replay(live, Some(replay)), public_lane(live, Some(replay))), (None, live));
        }
    }
}
