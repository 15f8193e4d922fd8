//! What an answer means, and what becomes of a message.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What became of an event for a subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Delivered,
    /// It is still to be sent.
    Pending,
    /// It is tried again.
    Failed,
    /// It was given up: a dead letter has it.
    Dead,
    /// The subscriber's filter did not let it through.
    Filtered,
    /// The subscriber was switched off.
    Inactive,
}

impl Outcome {
    pub const ALL: [Outcome; 6] =
        [Outcome::Delivered, Outcome::Pending, Outcome::Failed, Outcome::Dead, Outcome::Filtered, Outcome::Inactive];

    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Delivered => "delivered",
            Outcome::Pending => "pending",
            Outcome::Failed => "failed",
            Outcome::Dead => "dead",
            Outcome::Filtered => "filtered",
            Outcome::Inactive => "inactive",
        }
    }

    pub fn named(name: &str) -> Option<Outcome> {
        Outcome::ALL.into_iter().find(|one| one.as_str() == name)
    }

    /// Whether nothing more becomes of it by itself.
    pub fn is_final(self) -> bool {
        match self {
            Outcome::Delivered | Outcome::Dead | Outcome::Filtered | Outcome::Inactive => true,
            Outcome::Pending | Outcome::Failed => false,
        }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a message was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// All its retries failed.
    Exhausted,
    /// An answer that is not worth a retry.
    Refused,
    /// 410.
    Gone,
    /// Somebody moved it.
    Manual,
    /// It waited for too long.
    Expired,
}

impl Reason {
    pub const ALL: [Reason; 5] = [Reason::Exhausted, Reason::Refused, Reason::Gone, Reason::Manual, Reason::Expired];

    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Exhausted => "exhausted",
            Reason::Refused => "refused",
            Reason::Gone => "gone",
            Reason::Manual => "manual",
            Reason::Expired => "expired",
        }
    }

    pub fn named(name: &str) -> Option<Reason> {
        Reason::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

/// What a subscriber's answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Delivered,
    /// It may go better another time.
    Retry,
    /// It will not go better.
    Refused,
    /// 410: nobody wants anything there any more.
    Gone,
}

/// `status` is None when there was no answer.
pub fn verdict(status: Option<u16>, retry_statuses: &[u16]) -> Verdict {
    match status {
        None => Verdict::Retry,
        Some(200..=299) => Verdict::Delivered,
        Some(status) if retry_statuses.contains(&status) => Verdict::Retry,
        Some(410) => Verdict::Gone,
        Some(429 | 500..=599) => Verdict::Retry,
        Some(_) => Verdict::Refused,
    }
}

/// How long to wait after so many failures; None: no more. `chance` from 0 to 1 spreads those that failed together.
pub fn backoff(schedule: &[u32], failures: u32, chance: f64) -> Option<Duration> {
    let seconds = *schedule.get(failures.checked_sub(1)? as usize)?;
    Some(Duration::from_secs_f64(f64::from(seconds) * (1.0 + 0.2 * chance.clamp(0.0, 1.0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_decision_matrix() {
        for status in 100..=599 {
            let expected = match status {
                200..=299 => Verdict::Delivered,
                410 => Verdict::Gone,
                429 | 500..=599 => Verdict::Retry,
                _ => Verdict::Refused,
            };
            assert_eq!(verdict(Some(status), &[]), expected, "{status}");
        }
        assert_eq!(verdict(None, &[]), Verdict::Retry);
        assert_eq!(verdict(Some(409), &[409]), Verdict::Retry);
        assert_eq!(verdict(Some(410), &[410]), Verdict::Retry);
        assert_eq!(verdict(Some(204), &[204]), Verdict::Delivered);
    }

    #[test]
    fn the_fourth_failure_is_the_last() {
        let seconds = |failures| backoff(&[5, 30, 300], failures, 0.0).map(|pause| pause.as_secs());
        assert_eq!([1, 2, 3, 4].map(seconds), [Some(5), Some(30), Some(300), None]);
        assert_eq!(backoff(&[10], 1, 1.0), Some(Duration::from_secs(12)));
        assert_eq!(backoff(&[], 1, 0.0), None);
    }
}
