//! What a response means, and the outcome of a message.

use std::time::Duration;

use kit::backoff::lengthen;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;

/// The outcome of an event for a subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Outcome {
    Delivered,
    /// It has not been sent yet.
    Pending,
    /// The last attempt failed; it will be retried.
    Failed,
    /// It was given up and is a dead letter.
    Dead,
    /// It did not match the subscriber's filter.
    Filtered,
    /// The subscriber was switched off.
    Inactive,
}

impl Outcome {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// None if the name is unknown.
    pub fn named(name: &str) -> Option<Outcome> {
        name.parse().ok()
    }

    /// Whether the outcome stays unless an operator intervenes.
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

/// How far an event is, for all its subscribers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = HubEventStatus)]
pub enum EventStatus {
    /// The event is not fanned out yet: its subscribers are not determined.
    Pending,
    /// Some messages of the event are not delivered yet, or not created yet.
    Processing,
    /// Every message of the event is delivered or dead. An event without a matching subscriber is completed when it is
    /// fanned out.
    Completed,
}

/// Whether an event was turned into messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FanOutProgress {
    /// Fan-out has not read the event.
    Waiting,
    /// Fan-out has read the event, and creates messages for some subscribers later.
    Deferred,
    Done,
}

impl EventStatus {
    /// The status of an event with these outcomes.
    pub fn of(fan_out: FanOutProgress, mut outcomes: impl Iterator<Item = Outcome>) -> EventStatus {
        match fan_out {
            FanOutProgress::Done if outcomes.all(Outcome::is_final) => EventStatus::Completed,
            FanOutProgress::Done => EventStatus::Processing,
            FanOutProgress::Waiting | FanOutProgress::Deferred => match outcomes.next() {
                Some(_) => EventStatus::Processing,
                None => EventStatus::Pending,
            },
        }
    }
}

/// Why a message became a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Reason {
    /// All its retries failed.
    Exhausted,
    /// The subscriber answered with a status that is not retried.
    Refused,
    /// The subscriber answered 410.
    Gone,
    /// An operator requested it.
    Manual,
    /// It waited until the log no longer had its content.
    Expired,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// None if the name is unknown.
    pub fn named(name: &str) -> Option<Reason> {
        name.parse().ok()
    }
}

/// What the result of an attempt means for the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Delivered,
    /// A later attempt may succeed.
    Retry,
    /// A later attempt would fail, too.
    Refused,
    /// 410: the endpoint does not exist any more.
    Gone,
}

/// The verdict for a response; `status` is None if there was none.
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

/// Returns the time to wait after this many failures, or None if there is no further attempt. `schedule` is in seconds.
/// `random`, from 0 to 1, makes the time up to 20 % longer, so that messages that failed together are not retried
/// together.
pub fn backoff(schedule: &[u32], failures: u32, random: f64) -> Option<Duration> {
    let seconds = *schedule.get(failures.checked_sub(1)? as usize)?;
    Some(lengthen(Duration::from_secs(u64::from(seconds)), random))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_verdict() {
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
    fn an_event_without_subscribers_is_completed_only_when_it_is_fanned_out() {
        use FanOutProgress::{Deferred, Done, Waiting};
        use Outcome::{Dead, Delivered, Failed, Filtered, Pending};
        for (fan_out, outcomes, expected) in [
            (Waiting, &[][..], EventStatus::Pending),
            (Deferred, &[], EventStatus::Pending),
            (Deferred, &[Delivered], EventStatus::Processing),
            (Done, &[], EventStatus::Completed),
            (Done, &[Delivered, Dead, Filtered], EventStatus::Completed),
            (Done, &[Delivered, Failed], EventStatus::Processing),
            (Done, &[Pending], EventStatus::Processing),
        ] {
            assert_eq!(EventStatus::of(fan_out, outcomes.iter().copied()), expected, "{fan_out:?} {outcomes:?}");
        }
    }

    #[test]
    fn the_fourth_failure_is_the_last() {
        let seconds = |failures| backoff(&[5, 30, 300], failures, 0.0).map(|pause| pause.as_secs());
        assert_eq!([1, 2, 3, 4].map(seconds), [Some(5), Some(30), Some(300), None]);
        assert_eq!(backoff(&[10], 1, 1.0), Some(Duration::from_secs(12)));
        assert_eq!(backoff(&[], 1, 0.0), None);
    }
}
