//! JSON of preferences and event types.

use serde::Serialize;
use strum::VariantArray;
use utoipa::ToSchema;

use crate::domain::delivery_rules::{Channel, KnownType, Preference, QuietHours, Rules, ShownPreferences};
use crate::store::preferences::EventTypeRules;

/// The notifications that the user wants.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotificationPreferences)]
pub(crate) struct PreferencesView {
    /// The most specific one decides: type and channel, type, channel, neither. Without one, the user gets everything.
    preferences: Vec<PreferenceView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quiet_hours: Option<QuietHoursView>,
    /// The known event types, and what applies to each.
    event_types: Vec<EffectiveType>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotificationPreference)]
pub(crate) struct PreferenceView {
    /// Absent: all types.
    #[serde(skip_serializing_if = "Option::is_none")]
    event_type: Option<String>,
    /// Absent: all channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    channel: Option<Channel>,
    enabled: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = QuietHours)]
pub(crate) struct QuietHoursView {
    #[schema(example = "Europe/Berlin")]
    time_zone: String,
    #[schema(example = "22:00")]
    from: String,
    #[schema(example = "07:00")]
    until: String,
}

/// The rules and preferences that apply to an event type.
#[derive(Debug, Serialize, ToSchema)]
struct EffectiveType {
    #[schema(example = "join.promoted")]
    name: String,
    /// It cannot be muted.
    critical: bool,
    /// For how many minutes e-mails are collected into one; 0 means not at all.
    digest_minutes: u32,
    /// The channels over which the user gets it.
    channels: Vec<Channel>,
    /// The channels over which the user could get it, but has muted it.
    muted: Vec<Channel>,
}

/// How an event type is delivered.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EventTypeRules)]
pub(crate) struct EventTypeView {
    name: String,
    critical: bool,
    /// Absent: `email` and `in_app`.
    #[serde(skip_serializing_if = "Option::is_none")]
    channels: Option<Vec<Channel>>,
    /// Absent: the setting `notify.digest_minutes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    digest_minutes: Option<u32>,
}

/// An event type, and how it is delivered.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotifiedEventType)]
pub(crate) struct KnownTypeView {
    #[schema(example = "join.promoted")]
    name: String,
    /// It cannot be muted.
    critical: bool,
    channels: Vec<Channel>,
    /// For how many minutes e-mails are collected into one; 0 means not at all.
    digest_minutes: u32,
    /// Whether rules were set for it; otherwise the defaults apply.
    has_rules: bool,
}

impl From<KnownType> for KnownTypeView {
    fn from(known: KnownType) -> KnownTypeView {
        let KnownType { name, rules: Rules { critical, channels, digest_minutes }, has_rules } = known;
        KnownTypeView { name, critical, channels, digest_minutes, has_rules }
    }
}

impl From<ShownPreferences> for PreferencesView {
    fn from(shown: ShownPreferences) -> PreferencesView {
        let user_settings = &shown.user_settings;
        let effective = |(name, rules): &(String, Rules)| {
            let offered = Channel::VARIANTS.iter().copied().filter(|channel| rules.channels.contains(channel));
            let (channels, muted) = offered.partition(|channel| rules.critical || user_settings.wants(name, *channel));
            EffectiveType {
                name: name.clone(),
                critical: rules.critical,
                digest_minutes: rules.digest_minutes,
                channels,
                muted,
            }
        };
        PreferencesView {
            event_types: shown.event_types.iter().map(effective).collect(),
            preferences: user_settings.preferences.iter().cloned().map(PreferenceView::from).collect(),
            quiet_hours: user_settings.quiet.map(QuietHoursView::from),
        }
    }
}

impl From<Preference> for PreferenceView {
    fn from(preference: Preference) -> PreferenceView {
        let Preference { event_type, channel, enabled } = preference;
        PreferenceView { event_type: Some(event_type).filter(|name| !name.is_empty()), channel, enabled }
    }
}

impl From<QuietHours> for QuietHoursView {
    fn from(quiet: QuietHours) -> QuietHoursView {
        let time = |time: chrono::NaiveTime| time.format("%H:%M").to_string();
        QuietHoursView {
            time_zone: quiet.time_zone.name().to_owned(),
            from: time(quiet.from),
            until: time(quiet.until),
        }
    }
}

impl EventTypeView {
    pub(crate) fn new(name: String, rules: EventTypeRules) -> EventTypeView {
        let EventTypeRules { critical, channels, digest_minutes } = rules;
        EventTypeView { name, critical, channels, digest_minutes }
    }
}
