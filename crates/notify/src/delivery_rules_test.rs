//! Tests of [`crate::domain::delivery_rules`]: preferences, quiet hours around changes of the clocks, digests.

use chrono::{DateTime, NaiveTime, TimeDelta, Utc};
use proptest::prelude::*;

use crate::domain::delivery_rules::{Channel, Preference, QuietHours, Rules, UserSettings, plan};

fn time(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

fn quiet(time_zone: &str, from: &str, until: &str) -> QuietHours {
    let local = |text: &str| NaiveTime::parse_from_str(text, "%H:%M").unwrap();
    QuietHours { time_zone: time_zone.parse().unwrap(), from: local(from), until: local(until) }
}

fn preference(event_type: &str, channel: Option<Channel>, enabled: bool) -> Preference {
    Preference { event_type: event_type.to_owned(), channel, enabled }
}

fn rules(critical: bool, digest_minutes: u32) -> Rules {
    Rules { critical, channels: vec![Channel::Email, Channel::InApp, Channel::Webhook], digest_minutes }
}

#[test]
fn the_most_specific_preference_decides() {
    use Channel::{Email, InApp};
    let preferences = vec![
        preference("order.paid", Some(InApp), true),
        preference("order.paid", None, false),
        preference("", Some(Email), true),
        preference("", None, false),
    ];
    let user_settings = UserSettings { preferences, quiet: None };
    for (event_type, channel, expected) in [
        ("order.paid", InApp, true),
        ("order.paid", Email, false),
        ("other", Email, true),
        ("other", InApp, false),
        ("order.paid.late", Email, true),
    ] {
        assert_eq!(user_settings.wants(event_type, channel), expected, "{event_type} {channel:?}");
    }
    assert!(UserSettings::default().wants("anything", Email));
}

#[test]
fn a_critical_type_is_delivered_over_all_its_channels_at_once() {
    let user_settings = UserSettings {
        preferences: vec![preference("", None, false), preference("x", Some(Channel::Email), false)],
        quiet: Some(quiet("UTC", "00:00", "23:59")),
    };
    let now = time("2026-03-01T12:00:00Z");
    let all = [(Channel::Email, None), (Channel::InApp, None), (Channel::Webhook, None)];
    assert_eq!(plan(&rules(true, 60), &user_settings, "x", now), all);
    assert_eq!(plan(&rules(false, 60), &user_settings, "x", now), []);
    let mut only_in_app = rules(true, 0);
    only_in_app.channels = vec![Channel::InApp];
    assert_eq!(plan(&only_in_app, &user_settings, "x", now), [(Channel::InApp, None)]);
}

#[test]
fn only_emails_wait_for_quiet_hours_and_digests() {
    let user_settings = UserSettings { preferences: vec![], quiet: Some(quiet("Europe/Berlin", "22:00", "07:00")) };
    let due = |rules: &Rules, now: &str| {
        let planned = plan(rules, &user_settings, "x", time(now));
        assert_eq!(planned[1..], [(Channel::InApp, None), (Channel::Webhook, None)]);
        planned[0].1
    };
    assert_eq!(due(&rules(false, 0), "2026-01-10T12:00:00Z"), None);
    assert_eq!(due(&rules(false, 0), "2026-01-10T21:30:00Z"), Some(time("2026-01-11T06:00:00Z")));
    assert_eq!(due(&rules(false, 30), "2026-01-10T12:00:00Z"), Some(time("2026-01-10T12:30:00Z")));
    // The end of the collection is in the quiet hours.
    assert_eq!(due(&rules(false, 30), "2026-01-10T20:45:00Z"), Some(time("2026-01-11T06:00:00Z")));
    // The collection ends after the quiet hours.
    assert_eq!(due(&rules(false, 30), "2026-01-11T05:45:00Z"), Some(time("2026-01-11T06:15:00Z")));
}

#[test]
fn quiet_hours_end_at_the_local_time_also_when_clocks_change() {
    // Zone, quiet hours, a time, and the end if it is in the quiet hours.
    let cases = [
        ("Europe/Berlin", "22:00", "07:00", "2026-01-10T20:59:59Z", None),
        ("Europe/Berlin", "22:00", "07:00", "2026-01-10T21:00:00Z", Some("2026-01-11T06:00:00Z")),
        ("Europe/Berlin", "22:00", "07:00", "2026-01-11T05:59:59Z", Some("2026-01-11T06:00:00Z")),
        ("Europe/Berlin", "22:00", "07:00", "2026-01-11T06:00:00Z", None),
        // Within a day.
        ("Europe/Berlin", "12:00", "13:30", "2026-07-10T10:15:00Z", Some("2026-07-10T11:30:00Z")),
        ("Europe/Berlin", "12:00", "13:30", "2026-07-10T11:30:00Z", None),
        // The night in which clocks are set forward is an hour shorter, and the other one an hour longer.
        ("Europe/Berlin", "22:00", "07:00", "2026-03-28T22:00:00Z", Some("2026-03-29T05:00:00Z")),
        ("Europe/Berlin", "22:00", "07:00", "2026-10-24T21:00:00Z", Some("2026-10-25T06:00:00Z")),
        ("America/New_York", "22:00", "07:00", "2026-03-08T04:00:00Z", Some("2026-03-08T11:00:00Z")),
        ("America/New_York", "22:00", "07:00", "2026-11-01T04:00:00Z", Some("2026-11-01T12:00:00Z")),
        // 02:30 does not exist on this day: the quiet hours end, or begin, when the clocks show 03:00.
        ("Europe/Berlin", "22:00", "02:30", "2026-03-29T00:30:00Z", Some("2026-03-29T01:00:00Z")),
        ("Europe/Berlin", "22:00", "02:30", "2026-03-29T01:00:00Z", None),
        ("Europe/Berlin", "02:30", "07:00", "2026-03-29T00:59:59Z", None),
        ("Europe/Berlin", "02:30", "07:00", "2026-03-29T01:00:00Z", Some("2026-03-29T05:00:00Z")),
        // Both are in the gap: no quiet hours on this day.
        ("Europe/Berlin", "02:10", "02:50", "2026-03-29T00:59:59Z", None),
        ("Europe/Berlin", "02:10", "02:50", "2026-03-29T01:00:00Z", None),
        ("Europe/Berlin", "02:10", "02:50", "2026-03-30T00:20:00Z", Some("2026-03-30T00:50:00Z")),
        // 02:30 exists twice: the quiet hours end with the second, and begin with the first.
        ("Europe/Berlin", "22:00", "02:30", "2026-10-25T00:45:00Z", Some("2026-10-25T01:30:00Z")),
        ("Europe/Berlin", "02:30", "07:00", "2026-10-25T00:30:00Z", Some("2026-10-25T06:00:00Z")),
        ("Europe/Berlin", "02:30", "07:00", "2026-10-25T00:29:59Z", None),
        ("America/New_York", "01:30", "05:00", "2026-11-01T05:30:00Z", Some("2026-11-01T10:00:00Z")),
        // Clocks change by half an hour: 02:00 to 02:30 is missing, and 01:30 to 02:00 exists twice.
        ("Australia/Lord_Howe", "22:00", "02:15", "2026-10-03T15:00:00Z", Some("2026-10-03T15:30:00Z")),
        ("Australia/Lord_Howe", "22:00", "07:00", "2026-10-03T12:00:00Z", Some("2026-10-03T20:00:00Z")),
        ("Australia/Lord_Howe", "22:00", "01:45", "2026-04-04T14:50:00Z", Some("2026-04-04T15:15:00Z")),
        // A day that does not exist.
        ("Pacific/Apia", "22:00", "07:00", "2011-12-30T09:00:00Z", Some("2011-12-30T17:00:00Z")),
        // No quiet hours.
        ("Europe/Berlin", "08:00", "08:00", "2026-01-10T07:00:00Z", None),
        // Quiet hours of almost a day overlap where clocks are set back.
        ("Europe/Berlin", "02:10", "02:05", "2026-10-25T00:20:00Z", Some("2026-10-26T01:05:00Z")),
    ];
    for (zone, from, until, at, end) in cases {
        assert_eq!(quiet(zone, from, until).end_after(time(at)), end.map(time), "{zone} {from}-{until} at {at}");
    }
}

#[test]
fn a_change_of_the_zone_changes_the_quiet_hours_at_once() {
    let at = time("2026-01-10T22:00:00Z");
    assert_eq!(quiet("Europe/Berlin", "22:00", "07:00").end_after(at), Some(time("2026-01-11T06:00:00Z")));
    assert_eq!(quiet("America/New_York", "22:00", "07:00").end_after(at), None);
    assert_eq!(quiet("Asia/Tokyo", "22:00", "07:00").end_after(at), None);
}

const ZONES: [&str; 8] = [
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Asia/Kathmandu",
    "America/Sao_Paulo",
    "Africa/Casablanca",
    "UTC",
];

fn minutes(minutes: u32) -> NaiveTime {
    NaiveTime::from_hms_opt(minutes / 60, minutes % 60, 0).unwrap()
}

/// A time from 2010 to 2037, often near a change of the clocks in one of these zones.
fn any_time() -> impl Strategy<Value = i64> {
    let changes = [
        "2026-03-29T01:00:00Z",
        "2026-10-25T01:00:00Z",
        "2026-03-08T07:00:00Z",
        "2026-11-01T06:00:00Z",
        "2026-04-04T15:00:00Z",
        "2026-10-03T15:30:00Z",
        "2011-12-30T10:00:00Z",
    ];
    let near = (proptest::sample::select(changes.to_vec()), -100_000_i64..100_000);
    prop_oneof![1_262_304_000_i64..2_114_380_800, near.prop_map(|(change, seconds)| time(change).timestamp() + seconds),]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// The claim of quiet hours: an e-mail waits for about two days at most, and never arrives at a local time within them.
    #[test]
    fn no_email_is_due_at_a_local_time_within_quiet_hours(
        zone in proptest::sample::select(&ZONES[..]),
        (from, until) in (0_u32..1_440, 0_u32..1_440),
        at in any_time(),
        digest_minutes in prop_oneof![Just(0_u32), 0_u32..10_080],
    ) {
        let quiet = QuietHours { time_zone: zone.parse().unwrap(), from: minutes(from), until: minutes(until) };
        let at = DateTime::from_timestamp(at, 0).unwrap();
        let user_settings = UserSettings { preferences: vec![], quiet: Some(quiet) };
        let planned = plan(&rules(false, digest_minutes), &user_settings, "x", at);
        let collected_until = at + TimeDelta::minutes(i64::from(digest_minutes));
        let due = planned[0].1.unwrap_or(at);
        prop_assert!(due >= collected_until && due - collected_until < TimeDelta::hours(50), "{due}");
        let local = due.with_timezone(&quiet.time_zone).time();
        let is_quiet = if from < until { quiet.from <= local && local < quiet.until } else { from != until && (quiet.from <= local || local < quiet.until) };
        prop_assert!(!is_quiet, "{local}");
        // Once it is due it is not postponed again.
        prop_assert_eq!(quiet.end_after(due), None);
    }

    #[test]
    fn an_email_outside_of_quiet_hours_goes_at_once_where_clocks_do_not_change(
        (from, until) in (0_u32..1_440, 0_u32..1_440),
        at in 0_i64..4_000_000_000,
    ) {
        let quiet = QuietHours { time_zone: chrono_tz::Tz::UTC, from: minutes(from), until: minutes(until) };
        let at = DateTime::from_timestamp(at, 0).unwrap();
        let local = at.time();
        let is_quiet = if from < until { quiet.from <= local && local < quiet.until } else { from != until && (quiet.from <= local || local < quiet.until) };
        prop_assert_eq!(quiet.end_after(at).is_some(), is_quiet);
    }
}
