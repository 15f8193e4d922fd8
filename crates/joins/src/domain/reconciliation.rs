//! Compares an event as this service knows it with the event as the events service reports it.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::{EventStatus, EventVersion};
use contracts::joins::{Count, EventCounted, RestateRequest};
use uuid::Uuid;

use super::{RowCounts, StoredCount};

/// Messages with counts that changed less than this long ago may still be in flight to the events service.
const IN_FLIGHT_MAX: TimeDelta = TimeDelta::minutes(1);

/// An event as this service knows it: the stored values, and the counts computed from the rows.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct KnownEvent {
    pub(crate) event_id: Uuid,
    pub(crate) event_version: i64,
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: EventStatus,
    #[sqlx(flatten, try_from = "StoredCount")]
    pub(crate) counts: Count,
    #[sqlx(flatten)]
    pub(crate) row_counts: RowCounts,
    /// When the counts last changed.
    pub(crate) counts_changed_at: Option<DateTime<Utc>>,
}

/// The differences between the known event and the reported one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The stored counts contradict the rows.
    pub(crate) is_miscounted: bool,
    /// The correct counts, if the events service reported wrong ones.
    pub(crate) correction: Option<EventCounted>,
    /// Set if the events service must restate the event, so that either side can repair its data.
    pub(crate) restate: Option<RestateRequest>,
}

impl KnownEvent {
    /// Compares the known event with the reported one. `known` is None if this service does not know the event.
    pub(crate) fn compare(known: Option<&KnownEvent>, reported: &EventVersion, now: DateTime<Utc>) -> Difference {
        let Some(known) = known else { return compare_unknown(reported) };
        let Count { active, waitlisted, version } = known.counts;
        let is_miscounted = known.row_counts != RowCounts { active, waitlisted };
        // A higher version than this service ever issued dates from before its database was restored from a backup.
        // With a lower version, the message with the current counts may still be in flight.
        let is_reported_wrong = reported.count_version > version
            || reported.active_participants != known.row_counts.active
                && (reported.count_version == version
                    || known.counts_changed_at.is_none_or(|at| at + IN_FLIGHT_MAX <= now));
        // If the known version is lower than the reported one, the update is in flight or lost. If it is higher, the
        // event has changed since the report, or the events database was restored; the events service can tell which.
        // The same version with another status was issued twice, so this service asks for a version above it.
        let is_version_reused = known.event_version == reported.version && known.status != reported.status;
        let known_version = known.event_version + i64::from(is_version_reused);
        let counts = Count { active: known.row_counts.active, waitlisted: known.row_counts.waitlisted, version };
        Difference {
            is_miscounted,
            correction: is_reported_wrong.then_some(EventCounted { event_id: reported.event_id, counts }),
            restate: (is_miscounted || is_reported_wrong || known_version != reported.version)
                .then_some(RestateRequest { event_id: reported.event_id, version: known_version }),
        }
    }
}

/// An unpublished event need not be known here, as long as the events service reports no participants for it.
fn compare_unknown(reported: &EventVersion) -> Difference {
    let counts = Count { active: 0, waitlisted: 0, version: 0 };
    let is_reported_wrong = reported.active_participants != 0;
    let needs_restate = is_reported_wrong || reported.status == EventStatus::Published;
    Difference {
        is_miscounted: false,
        correction: is_reported_wrong.then_some(EventCounted { event_id: reported.event_id, counts }),
        restate: needs_restate.then_some(RestateRequest { event_id: reported.event_id, version: 0 }),
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000, 0).unwrap()
    }

    /// Version 5, published, two active and one waitlisted under count version 8, unchanged for an hour.
    fn known() -> KnownEvent {
        KnownEvent {
            event_id: Uuid::nil(),
            event_version: 5,
            status: EventStatus::Published,
            counts: Count { active: 2, waitlisted: 1, version: 8 },
            row_counts: RowCounts { active: 2, waitlisted: 1 },
            counts_changed_at: Some(now() - TimeDelta::hours(1)),
        }
    }

    fn reported() -> EventVersion {
        EventVersion {
            event_id: Uuid::from_u128(7),
            version: 5,
            status: EventStatus::Published,
            count_version: 8,
            active_participants: 2,
        }
    }

    /// Whether the event is miscounted, whether the report is corrected, and the version of the restate request.
    fn difference(known: Option<&KnownEvent>, reported: &EventVersion) -> (bool, bool, Option<i64>) {
        let found = KnownEvent::compare(known, reported, now());
        (found.is_miscounted, found.correction.is_some(), found.restate.map(|request| request.version))
    }

    #[test]
    fn counts_in_flight_are_not_a_difference() {
        assert_eq!(difference(Some(&known()), &reported()), (false, false, None));
        let just_changed = KnownEvent { counts_changed_at: Some(now() - TimeDelta::seconds(59)), ..known() };
        let before = EventVersion { count_version: 7, active_participants: 1, ..reported() };
        assert_eq!(difference(Some(&just_changed), &before), (false, false, None));
        let long_ago = known();
        assert_eq!(difference(Some(&long_ago), &before), (false, true, Some(5)), "the message was lost");
        let same_number = EventVersion { count_version: 3, ..reported() };
        assert_eq!(difference(Some(&long_ago), &same_number), (false, false, None));
    }

    #[test]
    fn counts_that_cannot_be_in_flight_are_a_difference() {
        let just_changed = KnownEvent { counts_changed_at: Some(now()), ..known() };
        let other_number = EventVersion { active_participants: 9, ..reported() };
        assert_eq!(difference(Some(&just_changed), &other_number), (false, true, Some(5)));
        let from_before = EventVersion { count_version: 9, ..reported() };
        assert_eq!(difference(Some(&just_changed), &from_before), (false, true, Some(5)), "joins were restored");
        let miscounted = KnownEvent { row_counts: RowCounts { active: 2, waitlisted: 2 }, ..just_changed };
        assert_eq!(difference(Some(&miscounted), &reported()), (true, false, Some(5)));
    }

    #[test]
    fn a_lower_or_higher_event_version_is_restated() {
        assert_eq!(difference(Some(&known()), &EventVersion { version: 6, ..reported() }), (false, false, Some(5)));
        assert_eq!(difference(Some(&known()), &EventVersion { version: 4, ..reported() }), (false, false, Some(5)));
        let canceled = EventVersion { status: EventStatus::Canceled, ..reported() };
        assert_eq!(difference(Some(&known()), &canceled), (false, false, Some(6)), "this version was issued twice");
        let without_participants = EventVersion { active_participants: 0, ..reported() };
        assert_eq!(difference(None, &without_participants), (false, false, Some(0)));
        let draft = EventVersion { status: EventStatus::Draft, ..without_participants };
        assert_eq!(difference(None, &draft), (false, false, None));
        assert_eq!(difference(None, &reported()), (false, true, Some(0)));
    }
}
