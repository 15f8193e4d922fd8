//! The outcome of a message and of an event.

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;

/// The outcome of an event for a subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
#[schema(as = DeliveryOutcome)]
pub(crate) enum Outcome {
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
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether the outcome stays unless an operator intervenes.
    pub(crate) fn is_final(self) -> bool {
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
pub(crate) enum EventStatus {
    /// The event is not fanned out yet: its subscribers are not determined.
    Pending,
    /// Some messages of the event are not delivered yet, or not created yet.
    Processing,
    /// Every message of the event is delivered or dead. An event without a matching subscriber is completed when it is
    /// fanned out.
    Completed,
    /// It was posted in SQL, and the catalogue of event types or a limit of the tenant refuses it: it is not sent.
    Rejected,
}

/// Whether an event has subscribers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = HubEventOutcome)]
pub(crate) enum EventOutcome {
    /// The event is not fanned out yet: its subscribers are not determined.
    Pending,
    /// No subscriber has subscribed to its type, and no stream contains it.
    Unmatched,
    /// At least one subscriber has subscribed to its type, also if its filter does not match or it is switched off; or a
    /// stream contains it.
    Matched,
    /// It was posted in SQL, and the catalogue of event types or a limit of the tenant refuses it, so it is not delivered.
    Rejected,
}

impl EventOutcome {
    /// `is_matched`: fan-out has created a message of the event, has recorded why it did not, or has added it to a stream.
    pub(crate) fn of(fan_out: FanOutProgress, is_matched: bool) -> EventOutcome {
        match fan_out {
            _ if is_matched => EventOutcome::Matched,
            FanOutProgress::Done => EventOutcome::Unmatched,
            FanOutProgress::Waiting | FanOutProgress::Deferred => EventOutcome::Pending,
        }
    }
}

/// Whether an event was turned into messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FanOutProgress {
    /// Fan-out has not read the event.
    Waiting,
    /// Fan-out has read the event, and creates messages for some subscribers later.
    Deferred,
    Done,
}

impl EventStatus {
    /// The status of an event with these outcomes.
    pub(crate) fn of(fan_out: FanOutProgress, mut outcomes: impl Iterator<Item = Outcome>) -> EventStatus {
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
#[schema(as = DeadLetterReason)]
pub(crate) enum Reason {
    /// All its retries failed.
    Exhausted,
    /// The subscriber answered with a status that is not retried.
    Refused,
    /// The subscriber answered 410, or another status that switches it off.
    Gone,
    /// An operator requested it.
    Manual,
    /// It waited until the log no longer had its content.
    Expired,
}

impl Reason {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_unmatched_only_when_it_is_fanned_out() {
        use FanOutProgress::{Deferred, Done, Waiting};
        for fan_out in [Waiting, Deferred, Done] {
            assert_eq!(EventOutcome::of(fan_out, true), EventOutcome::Matched);
        }
        let without = [Waiting, Deferred, Done].map(|fan_out| EventOutcome::of(fan_out, false));
        assert_eq!(without, [EventOutcome::Pending, EventOutcome::Pending, EventOutcome::Unmatched]);
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
}
