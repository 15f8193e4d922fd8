//! Replays: the types that requests, fan-out and the store share.

use std::cell::OnceCell;

use chrono::{DateTime, Utc};
use pillarbox::log::{LogRef, Message};
use serde_json::Value;
use uuid::Uuid;

use crate::deliveries;
use crate::deliveries::command::CONTROL_SOURCE;
use crate::directory::domain::{Interest, lane_at};
use crate::events::selection::EventSelection;
use crate::replays::domain::{ReplayKind, ReplaySelection, ReplayState};
use crate::rows::Unsigned;

/// Messages of replays that wait at one subscriber. Three quarters of what a subscriber queue has in memory, so that live
/// messages have room beside them. Fewer would be sent before the next outcomes are saved, for which a replay waits.
pub(crate) const WAITING_MAX: i64 = 1_536;
/// The same for a backfill. Its subscriber has no other messages, and one lane that fails should not hold up the others.
pub(crate) const BACKFILL_WAITING_MAX: i64 = 5_000;
/// Bytes of payloads of replays that wait at one subscriber.
pub(crate) const WAITING_BYTES_MAX: usize = 1024 * 1024;

/// A job that sends events again.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct Replay {
    pub(crate) id: Uuid,
    pub(crate) tenant: String,
    #[sqlx(try_from = "&'a str")]
    pub(crate) kind: ReplayKind,
    /// None: all subscribers of the tenant.
    pub(crate) subscriber: Option<Uuid>,
    #[sqlx(flatten)]
    pub(crate) selection: ReplaySelection,
    /// The events to send, in the order of the log. None: those of the time range.
    #[sqlx(flatten, try_from = "EventColumns")]
    pub(crate) events: Option<Vec<LogRef>>,
    /// Messages per second.
    #[sqlx(rename = "rate_per_second", try_from = "Unsigned")]
    pub(crate) rate: Option<u32>,
    pub(crate) requested_by: String,
    pub(crate) created_at: DateTime<Utc>,
    #[sqlx(flatten)]
    pub(crate) status: ReplayStatus,
    #[sqlx(flatten)]
    pub(crate) progress: ReplayProgress,
}

/// The columns of the events that a replay sends. All are null, or none is.
#[derive(sqlx::FromRow)]
struct EventColumns {
    event_log_shards: Option<Vec<i16>>,
    event_log_ids: Option<Vec<i64>>,
    event_log_ats: Option<Vec<DateTime<Utc>>>,
}

impl From<EventColumns> for Option<Vec<LogRef>> {
    fn from(row: EventColumns) -> Option<Vec<LogRef>> {
        let ids = row.event_log_ids?.into_iter().zip(row.event_log_ats?);
        let events = row.event_log_shards?.into_iter().zip(ids).map(|(shard, (id, at))| LogRef { shard, id, at });
        Some(events.collect())
    }
}

/// The state of a replay, and since when.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct ReplayStatus {
    #[sqlx(try_from = "&'a str")]
    pub(crate) state: ReplayState,
    /// Why it has failed.
    pub(crate) error: Option<String>,
    pub(crate) started_at: Option<DateTime<Utc>>,
    pub(crate) ended_at: Option<DateTime<Utc>>,
    pub(crate) paused_at: Option<DateTime<Utc>>,
    /// The start for the measured rate: moved forward by the time in which the replay was paused.
    pub(crate) timed_from: Option<DateTime<Utc>>,
}

/// How far a replay has come.
#[derive(Debug, Clone, Default, sqlx::FromRow)]
pub(crate) struct ReplayProgress {
    /// What it has read, and what a replay reads; positions of a `LogFollower`.
    pub(crate) read_to: Option<Value>,
    pub(crate) read_until: Option<Value>,
    /// It reads the ids from the first to the last one, and has read up to `position_id`.
    pub(crate) first_id: Option<i64>,
    pub(crate) last_id: Option<i64>,
    pub(crate) position_id: Option<i64>,
    /// No event of the time range has this id or a higher one.
    pub(crate) until_id: Option<i64>,
    /// How many of the named events are done.
    #[sqlx(try_from = "i32")]
    pub(crate) events_done: usize,
    /// The matching subscribers of the next event up to this one have their message.
    pub(crate) after: Option<Uuid>,
    /// When the last event that it has read was posted.
    pub(crate) position_at: Option<DateTime<Utc>>,
    /// Messages that it should create, and those that it has created.
    pub(crate) matched: i64,
    pub(crate) created: i64,
    /// The subscriber that has too many undelivered messages of replays.
    pub(crate) waits_for: Option<Uuid>,
}

/// What has become of the messages of a replay.
#[derive(Debug, Clone, Copy, Default, sqlx::FromRow)]
pub(crate) struct ReplayOutcomes {
    /// All messages. Counted at the same time as the others, so that none seems to be missing.
    pub(crate) created: i64,
    pub(crate) delivered: i64,
    pub(crate) dead: i64,
    /// Messages without an outcome whose subscriber was deleted: they are not sent.
    pub(crate) dropped: i64,
}

impl Replay {
    /// A replay that fan-out has not begun.
    pub(crate) fn new(
        tenant: &str,
        kind: ReplayKind,
        subscriber: Option<Uuid>,
        selection: ReplaySelection,
        requested_by: String,
        now: DateTime<Utc>,
    ) -> Replay {
        Replay {
            id: Uuid::now_v7(),
            tenant: tenant.to_owned(),
            kind,
            subscriber,
            selection,
            events: None,
            rate: None,
            requested_by,
            created_at: now,
            status: ReplayStatus {
                state: ReplayState::Pending,
                error: None,
                started_at: None,
                ended_at: None,
                paused_at: None,
                timed_from: None,
            },
            progress: ReplayProgress::default(),
        }
    }

    /// How many of its messages may wait at one subscriber, if their payloads have this size on average.
    pub(crate) fn waiting_max(&self, payload_bytes: usize) -> i64 {
        match self.kind {
            ReplayKind::Replay => ((WAITING_BYTES_MAX / payload_bytes.max(1)) as i64).clamp(1, WAITING_MAX),
            ReplayKind::Backfill => BACKFILL_WAITING_MAX,
        }
    }

    /// The replay ends in this state.
    pub(crate) fn end(&mut self, state: ReplayState, now: DateTime<Utc>) {
        (self.status.state, self.status.ended_at, self.progress.waits_for) = (state, Some(now), None);
    }

    /// The part that is done, from 0 to 1. None if it is not known yet.
    pub(crate) fn share_done(&self) -> Option<f64> {
        let ReplayProgress { first_id, last_id, position_id, events_done, .. } = &self.progress;
        if self.status.state == ReplayState::Finished {
            return Some(1.0);
        }
        if let Some(events) = &self.events {
            return Some(*events_done as f64 / events.len().max(1) as f64);
        }
        let (Some(first), Some(last), Some(at)) = (first_id, last_id, position_id) else { return None };
        Some(((at - first) as f64 / (last - first).max(1) as f64).clamp(0.0, 1.0))
    }
}

/// An event that a replay selects.
pub(crate) struct SelectedEvent<'a> {
    replay: &'a Replay,
    message: &'a Message,
    payload: OnceCell<Value>,
}

impl<'a> SelectedEvent<'a> {
    /// None if the replay does not select the event. `checks_time`: the event was read from a time range.
    pub(crate) fn new(
        replay: &'a Replay,
        events: &EventSelection,
        message: &'a Message,
        checks_time: bool,
    ) -> Option<SelectedEvent<'a>> {
        let is_event = message.source != CONTROL_SOURCE.as_str() && events.is_event(message);
        if !is_event || (checks_time && !replay.selection.includes_time(message.at)) {
            return None;
        }
        let event = SelectedEvent { replay, message, payload: OnceCell::new() };
        replay.selection.includes(&message.topic, || event.payload()).then_some(event)
    }

    /// Whether the replay sends the event to this subscriber, whose event types include that of the event.
    pub(crate) fn is_for(&self, interest: &Interest) -> bool {
        // A replay for one subscriber waits until it is active.
        let is_chosen =
            self.replay.subscriber.map_or(interest.is_active, |subscriber| subscriber == interest.subscriber);
        // A stream has a different way to read events again: a seek. And a subscriber gets no reports about itself.
        let is_excluded = interest.is_stream || deliveries::system_event::is_about(self.message, interest.subscriber);
        is_chosen && !is_excluded && interest.filter.as_ref().is_none_or(|filter| filter.matches(self.payload()))
    }

    /// The lane of the event at this subscriber.
    pub(crate) fn lane(&self, interest: &Interest) -> Option<String> {
        lane_of(interest, self.message, || self.payload())
    }

    fn payload(&self) -> &Value {
        self.payload.get_or_init(|| parse_payload(self.message))
    }
}

/// The lane of an event at a subscriber.
pub(crate) fn lane_of<'a>(
    interest: &Interest,
    message: &Message,
    payload: impl FnOnce() -> &'a Value,
) -> Option<String> {
    match &interest.ordering_key {
        Some(pointer) => lane_at(payload(), pointer),
        None => message.key.clone(),
    }
}

/// Every payload is JSON, but it may be nested too deeply for the parser: then it has no fields to match.
pub(crate) fn parse_payload(message: &Message) -> Value {
    serde_json::from_str(message.payload.get()).unwrap_or(Value::Null)
}
