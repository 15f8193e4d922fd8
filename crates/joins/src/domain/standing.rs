//! Comparing an event as it stands here with what the events service has of it.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::{EventStatus, EventVersion};
use contracts::joins::{Count, EventCounted, Wanted};

/// Counts that changed within this time may still be on their way to who has others.
const ON_THEIR_WAY: TimeDelta = TimeDelta::minutes(1);

/// An event in one look: what is kept of it, and what its rows say.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Standing {
    pub(crate) event_version: i64,
    pub(crate) status: EventStatus,
    pub(crate) counts: Count,
    /// Active and waitlisted by the rows.
    pub(crate) counted: (i32, i32),
    /// When the counts became what they are.
    pub(crate) counted_at: Option<DateTime<Utc>>,
}

/// How what is stated differs from what is here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// What is kept here is not what the rows say.
    pub(crate) is_miscounted: bool,
    /// What there is, if something else was told.
    pub(crate) is_told_wrong: Option<EventCounted>,
    /// It must be said again, so that the one or the other is put right.
    pub(crate) wanted: Option<Wanted>,
}

impl Standing {
    /// `here` is None for an event that is not known.
    pub(crate) fn compare(here: Option<&Standing>, stated: &EventVersion, now: DateTime<Utc>) -> Difference {
        let Some(here) = here else { return unknown(stated) };
        let Count { active, waitlisted, version } = here.counts;
        let is_miscounted = here.counted != (active, waitlisted);
        // A version that was never given here can only be from before this database was set back. A lower one may be about
        // to be replaced.
        let is_told_wrong = stated.count_version > version
            || stated.active_participants != here.counted.0
                && (stated.count_version == version || here.counted_at.is_none_or(|at| at + ON_THEIR_WAY <= now));
        // Older news than were stated are on their way, or lost; newer ones came meanwhile, or events were set back. They know
        // which. Other news of the same version are newer for them, too: they gave it twice.
        let has_other_news = here.event_version == stated.version && here.status != stated.status;
        let known = here.event_version + i64::from(has_other_news);
        let counts = Count { active: here.counted.0, waitlisted: here.counted.1, version };
        Difference {
            is_miscounted,
            is_told_wrong: is_told_wrong.then_some(EventCounted { event_id: stated.event_id, counts }),
            wanted: (is_miscounted || is_told_wrong || known != stated.version)
                .then_some(Wanted { event_id: stated.event_id, version: known }),
        }
    }
}

/// What is not published needs not be known, as long as nobody is said to take part.
fn unknown(stated: &EventVersion) -> Difference {
    let counts = Count { active: 0, waitlisted: 0, version: 0 };
    let is_told_wrong = stated.active_participants != 0;
    let is_wanted = is_told_wrong || stated.status == EventStatus::Published;
    Difference {
        is_miscounted: false,
        is_told_wrong: is_told_wrong.then_some(EventCounted { event_id: stated.event_id, counts }),
        wanted: is_wanted.then_some(Wanted { event_id: stated.event_id, version: 0 }),
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000, 0).unwrap()
    }

    /// Version 5, published, two active and one waiting by version 8, since an hour ago.
    fn here() -> Standing {
        Standing {
            event_version: 5,
            status: EventStatus::Published,
            counts: Count { active: 2, waitlisted: 1, version: 8 },
            counted: (2, 1),
            counted_at: Some(now() - TimeDelta::hours(1)),
        }
    }

    fn stated() -> EventVersion {
        EventVersion {
            event_id: Uuid::from_u128(7),
            version: 5,
            status: EventStatus::Published,
            count_version: 8,
            active_participants: 2,
        }
    }

    /// Whether it is miscounted, told wrong, and the version that is wanted above, if it is wanted.
    fn difference(here: Option<&Standing>, stated: &EventVersion) -> (bool, bool, Option<i64>) {
        let found = Standing::compare(here, stated, now());
        (found.is_miscounted, found.is_told_wrong.is_some(), found.wanted.map(|wanted| wanted.version))
    }

    #[test]
    fn what_is_on_its_way_has_not_drifted() {
        assert_eq!(difference(Some(&here()), &stated()), (false, false, None));
        let lately = Standing { counted_at: Some(now() - TimeDelta::seconds(59)), ..here() };
        let before = EventVersion { count_version: 7, active_participants: 1, ..stated() };
        assert_eq!(difference(Some(&lately), &before), (false, false, None));
        let long_ago = here();
        assert_eq!(difference(Some(&long_ago), &before), (false, true, Some(5)), "it was lost");
        let same_number = EventVersion { count_version: 3, ..stated() };
        assert_eq!(difference(Some(&long_ago), &same_number), (false, false, None));
    }

    #[test]
    fn what_cannot_be_on_its_way_has_drifted() {
        let lately = Standing { counted_at: Some(now()), ..here() };
        let other_number = EventVersion { active_participants: 9, ..stated() };
        assert_eq!(difference(Some(&lately), &other_number), (false, true, Some(5)));
        let from_before = EventVersion { count_version: 9, ..stated() };
        assert_eq!(difference(Some(&lately), &from_before), (false, true, Some(5)), "joins were set back");
        let miscounted = Standing { counted: (2, 2), ..lately };
        assert_eq!(difference(Some(&miscounted), &stated()), (true, false, Some(5)));
    }

    #[test]
    fn other_news_are_wanted_older_or_newer() {
        assert_eq!(difference(Some(&here()), &EventVersion { version: 6, ..stated() }), (false, false, Some(5)));
        assert_eq!(difference(Some(&here()), &EventVersion { version: 4, ..stated() }), (false, false, Some(5)));
        let canceled = EventVersion { status: EventStatus::Canceled, ..stated() };
        assert_eq!(difference(Some(&here()), &canceled), (false, false, Some(6)), "this version was given twice");
        let of_nobody = EventVersion { active_participants: 0, ..stated() };
        assert_eq!(difference(None, &of_nobody), (false, false, Some(0)));
        assert_eq!(difference(None, &EventVersion { status: EventStatus::Draft, ..of_nobody }), (false, false, None));
        assert_eq!(difference(None, &stated()), (false, true, Some(0)));
    }
}
