//! Adds the messages that an event leads to, for the subscribers and streams that match its type.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::log::Message;

use super::batch::Batch;
use crate::deliveries;
use crate::deliveries::message::HubEvent;
use crate::directory::domain::{Backfill, Interest};
use crate::replays::replay::{lane_of, parse_payload};
use crate::streams::domain::part_of;
use crate::streams::store::messages::NewStreamMessage;

/// Allowance for clock skew between replicas.
const CLOCK_SKEW: TimeDelta = TimeDelta::minutes(1);

/// How an event reaches fan-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Live,
    /// A replay of the log repairs what the live run has missed.
    Repair,
    /// It was deferred, with this id.
    Deferred(i64),
    /// It was rejected, and retried at this time: it counts as posted then.
    Accepted(DateTime<Utc>),
}

/// Whether an event creates nothing for a subscriber that it matches.
fn is_excluded(interest: &Interest, message: &Message, origin: Origin) -> bool {
    if let Origin::Accepted(accepted_at) = origin {
        // A backfill leaves it out unless it was accepted before the backfill was requested: see `LeftOut`.
        return accepted_at < interest.since;
    }
    let is_covered = match (interest.backfill, origin) {
        // The backfill reads what fan-out has read: it creates the message.
        (Some(Backfill::Active), _) => true,
        (Some(Backfill::Ended { deferred_to }), Origin::Deferred(id)) => id <= deferred_to,
        (Some(Backfill::Ended { .. }), Origin::Live | Origin::Repair | Origin::Accepted(_)) | (None, _) => false,
    };
    // A repair, or a deferred event, creates nothing for a subscriber that did not exist when the event was posted.
    is_covered || (origin != Origin::Live && interest.since > message.at + CLOCK_SKEW)
}

/// Adds a hub message, or the record that it is skipped, for each of the subscribers; after `end` for no more of them than the
/// first. Returns for how many.
pub(super) fn add_messages<'a>(
    message: &Message,
    origin: Origin,
    matching: impl ExactSizeIterator<Item = &'a Interest>,
    end: Option<Instant>,
    batch: &mut Batch,
) -> usize {
    if matching.len() == 0 {
        return 0;
    }
    let event = Arc::new(HubEvent::from_log(message));
    let payload = OnceCell::new();
    let value = || payload.get_or_init(|| parse_payload(message));
    let (mut filtered, mut inactive, mut done) = (Vec::new(), Vec::new(), 0);
    for interest in matching {
        if done > 0 && end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
        done += 1;
        if is_excluded(interest, message, origin) {
            continue;
        }
        // Otherwise a report about a failing subscriber would also fail, and lead to the next report.
        if deliveries::system_event::is_about(message, interest.subscriber) {
            continue;
        }
        if !interest.is_active {
            inactive.push(interest.subscriber);
            continue;
        }
        if interest.filter.as_ref().is_some_and(|filter| !filter.matches(value())) {
            // The outcomes of an event are those of subscribers.
            if !interest.is_stream {
                filtered.push(interest.subscriber);
            }
            continue;
        }
        let lane = lane_of(interest, message, value);
        if interest.is_stream {
            let part = part_of(lane.as_deref(), message.message_id);
            let (stream, log_ref) = (interest.subscriber, message.log_ref());
            batch.stream_messages.push(NewStreamMessage { stream, part, lane, seq: None, log_ref });
            continue;
        }
        batch.add_message(interest.subscriber, lane, message.log_ref(), event.clone());
    }
    batch.size += done;
    batch.add_skipped(message.id, filtered, inactive);
    done
}
