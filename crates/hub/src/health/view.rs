//! The health of a subscriber in API responses.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::health::counts::{AttemptCounts, Percentiles};

/// The length of the intervals of a series, in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
#[schema(as = HealthResolution)]
pub(crate) enum Resolution {
    /// At most for one day.
    Minute,
    /// At most for 31 days.
    #[default]
    Hour,
    /// At most for 366 days.
    Day,
}

/// How a subscriber is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = SubscriberHealthState)]
pub(crate) enum HealthState {
    /// The last attempt succeeded, or there was none.
    Healthy,
    /// The last attempt failed.
    Failing,
    /// At least 20 attempts failed in a row: one message is tried at a time.
    BreakerOpen,
    /// Messages wait until the subscriber is resumed.
    Paused,
    /// No messages are created for it.
    Disabled,
}

/// What the attempts of some time led to.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AttemptTotals)]
pub(crate) struct CountsView {
    attempts: i64,
    delivered: i64,
    /// Attempts that failed and were retried.
    failed: i64,
    /// Attempts after which the message was given up.
    dead: i64,
    /// The part of the attempts that succeeded, from 0 to 1. Absent without attempts.
    #[serde(skip_serializing_if = "Option::is_none")]
    success_rate: Option<f64>,
    /// Absent without attempts.
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_ms: Option<Percentiles>,
}

/// The attempts of one interval.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HealthInterval)]
pub(crate) struct IntervalView {
    /// The start of the interval.
    at: DateTime<Utc>,
    #[serde(flatten)]
    counts: CountsView,
}

/// The health of a subscriber.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SubscriberHealth)]
pub(crate) struct HealthView {
    pub(crate) subscriber_id: Uuid,
    pub(crate) state: HealthState,
    /// When the first of the last attempts failed, all of which failed. Absent if the last one succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failing_since: Option<DateTime<Utc>>,
    pub(crate) from: DateTime<Utc>,
    pub(crate) to: DateTime<Utc>,
    pub(crate) resolution: Resolution,
    pub(crate) totals: CountsView,
    /// Oldest first. Intervals without attempts are left out.
    pub(crate) series: Vec<IntervalView>,
}

impl From<&AttemptCounts> for CountsView {
    fn from(counts: &AttemptCounts) -> CountsView {
        CountsView {
            attempts: counts.attempts(),
            delivered: counts.delivered,
            failed: counts.failed,
            dead: counts.dead,
            success_rate: counts.success_rate(),
            latency_ms: counts.percentiles(),
        }
    }
}

impl IntervalView {
    pub(crate) fn new(at: DateTime<Utc>, counts: &AttemptCounts) -> IntervalView {
        IntervalView { at, counts: counts.into() }
    }
}
