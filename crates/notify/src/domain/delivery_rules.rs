//! Over which channels a person gets a notification, and when.
//!
//! The event type decides which channels there are; the person's preferences decide which of them are used, and quiet
//! hours and digests when an e-mail is due. A critical event type is delivered over all its channels, at once.

use chrono::{DateTime, MappedLocalTime, NaiveDate, NaiveTime, TimeDelta, TimeZone, Utc};
use chrono_tz::Tz;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a notification reaches a person.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ToSchema,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[schema(as = NotificationChannel)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Channel {
    Email,
    InApp,
    Webhook,
}

/// How the events of a type are delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rules {
    /// It cannot be muted, and it waits for nothing.
    pub critical: bool,
    pub channels: Vec<Channel>,
    /// For how many minutes the e-mails to one person are collected into one; 0 means not at all.
    pub digest_minutes: u32,
}

impl Rules {
    /// The rules of an event type for which none were set.
    pub(crate) fn default_with(digest_minutes: u32) -> Rules {
        Rules { critical: false, channels: vec![Channel::Email, Channel::InApp], digest_minutes }
    }

    /// Whether e-mails are collected.
    pub(crate) fn is_digest(&self) -> bool {
        self.digest_minutes > 0 && !self.critical
    }
}

/// The largest number of preferences of a user.
pub(crate) const PREFERENCES_MAX: usize = 500;

/// The version of a row and the time of its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Version {
    #[sqlx(rename = "version")]
    pub(crate) number: i64,
    pub(crate) changed_at: DateTime<Utc>,
}

impl Version {
    /// The version of something that was never set.
    pub(crate) const NONE: Version = Version { number: 0, changed_at: DateTime::UNIX_EPOCH };
}

/// An event type, and how it is delivered.
#[derive(Debug)]
pub(crate) struct KnownType {
    pub(crate) name: String,
    pub(crate) rules: Rules,
    /// Whether rules were set for it.
    pub(crate) has_rules: bool,
}

/// The preferences of a user, and the event types that they apply to.
#[derive(Debug)]
pub(crate) struct ShownPreferences {
    pub(crate) user_settings: UserSettings,
    /// The known event types, by name: those of Pillarbox itself, those with rules, those that the user has named, and those of
    /// the user's latest notifications.
    pub(crate) event_types: Vec<(String, Rules)>,
    pub(crate) version: Version,
}

/// The notifications that a person wants, and when.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UserSettings {
    pub preferences: Vec<Preference>,
    pub quiet: Option<QuietHours>,
}

/// One preference. The most specific one decides: type and channel, type, channel, neither.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Preference {
    /// Empty: all types.
    pub event_type: String,
    /// None: all channels.
    pub channel: Option<Channel>,
    pub enabled: bool,
}

/// When a person wants no e-mails: every day from `from` to `until`, in local time; across midnight if `until` is earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuietHours {
    pub time_zone: Tz,
    pub from: NaiveTime,
    pub until: NaiveTime,
}

/// Returns the channels over which a person gets an event of this type, with the time at which each is due. None: at once.
pub(crate) fn plan(
    rules: &Rules,
    user_settings: &UserSettings,
    event_type: &str,
    now: DateTime<Utc>,
) -> Vec<(Channel, Option<DateTime<Utc>>)> {
    let is_wanted = |channel: &&Channel| rules.critical || user_settings.wants(event_type, **channel);
    let channels = rules.channels.iter().filter(is_wanted);
    channels.map(|channel| (*channel, due(rules, user_settings, *channel, now))).collect()
}

fn due(rules: &Rules, user_settings: &UserSettings, channel: Channel, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
    match channel {
        Channel::Email if !rules.critical => {
            let collected_until = now + TimeDelta::minutes(i64::from(rules.digest_minutes));
            let due = user_settings.quiet_until(collected_until).unwrap_or(collected_until);
            Some(due).filter(|due| *due > now)
        }
        Channel::Email | Channel::InApp | Channel::Webhook => None,
    }
}

impl UserSettings {
    /// Whether the person wants events of this type over this channel. Without a matching preference: yes.
    pub(crate) fn wants(&self, event_type: &str, channel: Channel) -> bool {
        let matches = |preference: &&Preference| {
            (preference.event_type.is_empty() || preference.event_type == event_type)
                && preference.channel.is_none_or(|other| other == channel)
        };
        let precision = |preference: &&Preference| (!preference.event_type.is_empty(), preference.channel.is_some());
        self.preferences.iter().filter(matches).max_by_key(precision).is_none_or(|preference| preference.enabled)
    }

    /// If this time is in the quiet hours, returns their end.
    pub(crate) fn quiet_until(&self, time: DateTime<Utc>) -> Option<DateTime<Utc>> {
        self.quiet.as_ref()?.end_after(time)
    }
}

impl QuietHours {
    /// If this time is in the quiet hours, returns the first time after them.
    pub(crate) fn end_after(&self, time: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut end = None;
        // Where clocks are set back, the quiet hours of two days can overlap.
        while let Some(later) = self.interval_with(end.unwrap_or(time)) {
            end = Some(later);
        }
        end
    }

    /// Returns the end of the quiet hours of the day, or of the day before, that contain this time.
    fn interval_with(&self, time: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let today = time.with_timezone(&self.time_zone).date_naive();
        // A day can be missing: the zones of Samoa and Tokelau have skipped one.
        let days = [today.pred_opt().and_then(|day| day.pred_opt()), today.pred_opt(), Some(today)];
        let intervals = days.into_iter().flatten().filter_map(|day| self.of_day(day));
        intervals.filter(|(start, end)| *start <= time && time < *end).map(|(_, end)| end).max()
    }

    /// The quiet hours that begin on this day. A local time that does not exist is the end of the gap. Of a local time that
    /// exists twice, the quiet hours begin with the first and end with the second, so that no e-mail arrives at a local
    /// time within them.
    fn of_day(&self, day: NaiveDate) -> Option<(DateTime<Utc>, DateTime<Utc>)> {
        let last_day = if self.from < self.until { day } else { day.succ_opt()? };
        let start = self.resolve(day, self.from, MappedLocalTime::earliest)?;
        let end = self.resolve(last_day, self.until, MappedLocalTime::latest)?;
        Some((start, end)).filter(|_| self.from != self.until)
    }

    fn resolve(
        &self,
        day: NaiveDate,
        time: NaiveTime,
        choose: impl Fn(MappedLocalTime<DateTime<Tz>>) -> Option<DateTime<Tz>>,
    ) -> Option<DateTime<Utc>> {
        /// A gap is at most a day long and ends at a full minute.
        const GAP_MINUTES_MAX: i64 = 25 * 60;
        let local = day.and_time(time);
        let existing = (0..=GAP_MINUTES_MAX)
            .find_map(|minutes| choose(self.time_zone.from_local_datetime(&(local + TimeDelta::minutes(minutes)))));
        existing.map(|time| time.with_timezone(&Utc))
    }
}
