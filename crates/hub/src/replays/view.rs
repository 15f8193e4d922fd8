//! Replays in API responses.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::directory::domain::{EventTypes, Filter};
use crate::replays::domain::{ReplayKind, ReplayMode, ReplayState};
use crate::replays::replay::{Replay, ReplayOutcomes};

/// A job that sends events again.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubReplay)]
pub(crate) struct ReplayView {
    pub(crate) id: Uuid,
    kind: ReplayKind,
    /// Absent: all subscribers of the tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    subscriber_id: Option<Uuid>,
    /// The name of the subscriber in responses to reads. Absent if it was deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    subscriber_name: Option<String>,
    mode: ReplayMode,
    /// The number of named events. Absent: those of the time range are sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<DateTime<Utc>>,
    /// Empty: all types.
    event_types: Vec<EventTypes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    filter: Option<Filter>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_per_second: Option<u32>,
    requested_by: String,
    created_at: DateTime<Utc>,
    #[serde(flatten)]
    progress: ReplayProgressView,
}

/// How far a replay has come.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HubReplayProgress)]
pub(crate) struct ReplayProgressView {
    pub(crate) state: ReplayState,
    /// Why it has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    started_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_at: Option<DateTime<Utc>>,
    /// Messages to send that were found so far, and those of them that were created.
    pub(crate) matched: i64,
    pub(crate) created: i64,
    pub(crate) delivered: i64,
    /// Messages that were given up: they are dead letters.
    pub(crate) dead: i64,
    /// Messages that are not sent, because their subscriber was deleted.
    pub(crate) dropped: i64,
    /// Messages that were created and have none of these outcomes yet.
    pub(crate) waiting: i64,
    /// The part that is done, from 0 to 1. Absent: not known yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) done: Option<f64>,
    /// When the last event that was read was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<DateTime<Utc>>,
    /// Messages per second so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<f64>,
    /// The time until all messages are created, if it continues like this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eta_seconds: Option<u64>,
    /// The subscriber at which too many messages of replays wait: the replay continues when it has received some.
    #[serde(skip_serializing_if = "Option::is_none")]
    waits_for: Option<Uuid>,
}

/// The answer to a dry run.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[schema(as = HubReplayCount)]
pub(crate) struct ReplayCount {
    /// The number of messages that the replay would create, or a lower bound.
    pub(crate) matched: u64,
    /// Whether the number is exact. False: at least so many, because only the beginning of the range was counted.
    pub(crate) is_exact: bool,
}

impl ReplayView {
    pub(crate) fn new((replay, outcomes): (Replay, ReplayOutcomes), now: DateTime<Utc>) -> ReplayView {
        let progress = ReplayProgressView::new(&replay, outcomes, now);
        let is_range = replay.events.is_none();
        ReplayView {
            id: replay.id,
            kind: replay.kind,
            subscriber_id: replay.subscriber,
            subscriber_name: None,
            mode: replay.selection.mode,
            events: replay.events.map(|events| events.len()),
            from: is_range.then_some(replay.selection.from),
            to: replay.selection.to,
            event_types: replay.selection.event_types,
            filter: replay.selection.filter,
            rate_per_second: replay.rate,
            requested_by: replay.requested_by,
            created_at: replay.created_at,
            progress,
        }
    }
}

impl ReplayView {
    /// The view with the name of its subscriber, by the names of subscribers.
    pub(crate) fn named(self, names: &HashMap<Uuid, String>) -> ReplayView {
        let subscriber_name = self.subscriber_id.and_then(|id| names.get(&id).cloned());
        ReplayView { subscriber_name, ..self }
    }
}

impl ReplayProgressView {
    pub(crate) fn new(replay: &Replay, outcomes: ReplayOutcomes, now: DateTime<Utc>) -> ReplayProgressView {
        let (status, progress, done) = (&replay.status, &replay.progress, replay.share_done());
        let until = status.ended_at.or(status.paused_at).unwrap_or(now);
        let seconds = status.timed_from.map(|from| (until - from).as_seconds_f64()).filter(|seconds| *seconds > 0.0);
        let is_running = status.state == ReplayState::Running;
        let eta = |seconds: f64, done: f64| (done > 0.0).then(|| (seconds * (1.0 - done) / done).ceil() as u64);
        ReplayProgressView {
            state: status.state,
            error: status.error.clone(),
            started_at: status.started_at,
            ended_at: status.ended_at,
            matched: progress.matched,
            created: outcomes.created,
            delivered: outcomes.delivered,
            dead: outcomes.dead,
            dropped: outcomes.dropped,
            waiting: outcomes.created - outcomes.delivered - outcomes.dead - outcomes.dropped,
            done,
            position: progress.position_at,
            rate: seconds.map(|seconds| progress.created as f64 / seconds),
            eta_seconds: seconds.zip(done).filter(|_| is_running).and_then(|(seconds, done)| eta(seconds, done)),
            waits_for: progress.waits_for,
        }
    }
}
