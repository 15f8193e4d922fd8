//! Replays: which events they send again, and their states.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;

use crate::directory::domain::{EventTypes, Filter};

/// The state of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(crate) enum ReplayState {
    /// Fan-out has not begun it.
    Pending,
    Running,
    /// It creates no messages until it is resumed.
    Paused,
    /// All its messages are created.
    Finished,
    Canceled,
    /// It cannot be continued; `error` says why.
    Failed,
}

/// What a caller does with a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplayAction {
    Pause,
    Resume,
    Cancel,
}

/// What a replay does with an event that the subscriber has a message of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(crate) enum ReplayMode {
    /// It sends the event again.
    Resend,
    /// It sends only events of which the subscriber has no message.
    Missed,
}

/// How the messages of a replay are ordered with those of live events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(crate) enum ReplayKind {
    /// It has separate lanes, beside those of live events.
    Replay,
    /// It sends into the subscriber's own lanes, before live events.
    Backfill,
}

/// The events that a replay sends, in addition to what each subscriber selects itself.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct ReplaySelection {
    #[sqlx(try_from = "&'a str")]
    pub(crate) mode: ReplayMode,
    #[sqlx(rename = "from_at")]
    pub(crate) from: DateTime<Utc>,
    #[sqlx(rename = "to_at")]
    pub(crate) to: Option<DateTime<Utc>>,
    /// Empty: all types.
    pub(crate) event_types: Vec<EventTypes>,
    #[sqlx(json(nullable))]
    pub(crate) filter: Option<Filter>,
}

impl ReplayState {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }

    pub(crate) fn is_ended(self) -> bool {
        match self {
            ReplayState::Pending | ReplayState::Running | ReplayState::Paused => false,
            ReplayState::Finished | ReplayState::Canceled | ReplayState::Failed => true,
        }
    }

    /// The state after an action; None if it is refused. An action that changes nothing is allowed, because a request may be
    /// repeated.
    pub(crate) fn after(self, action: ReplayAction, has_started: bool) -> Option<ReplayState> {
        match (self, action) {
            (ReplayState::Pending | ReplayState::Running | ReplayState::Paused, ReplayAction::Pause) => {
                Some(ReplayState::Paused)
            }
            (ReplayState::Paused, ReplayAction::Resume) if has_started => Some(ReplayState::Running),
            (ReplayState::Paused, ReplayAction::Resume) => Some(ReplayState::Pending),
            (state @ (ReplayState::Pending | ReplayState::Running), ReplayAction::Resume) => Some(state),
            (
                ReplayState::Pending | ReplayState::Running | ReplayState::Paused | ReplayState::Canceled,
                ReplayAction::Cancel,
            ) => Some(ReplayState::Canceled),
            _ => None,
        }
    }
}

impl ReplayMode {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

impl ReplayKind {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

impl ReplaySelection {
    /// Whether the time of an event is in the range.
    pub(crate) fn includes_time(&self, at: DateTime<Utc>) -> bool {
        at >= self.from && self.to.is_none_or(|to| at < to)
    }

    /// Whether type and payload of an event are selected.
    pub(crate) fn includes<'a>(&self, event_type: &str, payload: impl FnOnce() -> &'a Value) -> bool {
        let has_type = self.event_types.is_empty() || self.event_types.iter().any(|types| types.include(event_type));
        has_type && self.filter.as_ref().is_none_or(|filter| filter.matches(payload()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_replay_is_neither_paused_nor_resumed() {
        let (pause, resume, cancel) = (ReplayAction::Pause, ReplayAction::Resume, ReplayAction::Cancel);
        for ended in [ReplayState::Finished, ReplayState::Failed] {
            assert!([pause, resume, cancel].iter().all(|action| ended.after(*action, true).is_none()));
        }
        assert_eq!(ReplayState::Canceled.after(cancel, true), Some(ReplayState::Canceled), "a repeated request");
        assert_eq!(ReplayState::Canceled.after(resume, true), None);
        assert_eq!(ReplayState::Paused.after(resume, false), Some(ReplayState::Pending));
        assert_eq!(ReplayState::Paused.after(resume, true), Some(ReplayState::Running));
        assert_eq!(ReplayState::Running.after(pause, true), Some(ReplayState::Paused));
    }
}
