//! The result of one attempt.

use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::deliveries::domain::{Outcome, Reason, Verdict};

/// The result of one attempt.
#[derive(Debug, Clone)]
pub(crate) struct AttemptResult {
    pub(crate) verdict: Verdict,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) status: Option<u16>,
    pub(crate) latency: Duration,
    pub(crate) error: Option<&'static str>,
    pub(crate) detail: Option<String>,
    pub(crate) excerpt: Option<String>,
    /// Set if no request was sent, with the reason.
    pub(crate) not_sent: Option<Reason>,
}

impl AttemptResult {
    /// The result for a message that is given up without a request.
    pub(crate) fn not_sent(reason: Reason, detail: &str) -> AttemptResult {
        AttemptResult {
            verdict: Verdict::Refused,
            retry_after: None,
            status: None,
            latency: Duration::ZERO,
            error: Some(reason.as_str()),
            detail: Some(detail.to_owned()),
            excerpt: None,
            not_sent: Some(reason),
        }
    }

    /// The detail text of the dead letter, if this result makes one.
    pub(crate) fn dead_letter_detail(&self) -> String {
        match (self.status, &self.detail) {
            (Some(status), _) => format!("answered {status}"),
            (None, Some(detail)) => detail.clone(),
            (None, None) => self.error.unwrap_or("failed").to_owned(),
        }
    }
}

/// A finished attempt, to be stored.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) at: DateTime<Utc>,
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) attempt: u16,
    pub(crate) outcome: Outcome,
    pub(crate) result: AttemptResult,
    /// The replay that has created the message.
    pub(crate) replay: Option<Uuid>,
    /// The message was a dead letter, and an operator has retried it.
    pub(crate) was_dead: bool,
    /// If it delivered the message: how long ago the event was posted. None for messages that were sent again on request.
    pub(crate) time_since_post: Option<Duration>,
}
