//! The preferences of users, and the rules of event types.

use std::collections::BTreeSet;

use http_kit::etag::IfMatch;
use pillarbox::database::Database;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::domain::delivery_rules::{
    KnownType, PREFERENCES_MAX, Preference, QuietHours, Rules, ShownPreferences, Version,
};
use crate::error::Error;
use crate::store::preferences::{self as store, EventTypeRules, StoredEventType};
use crate::templates::notification;
use crate::unsubscribe::Unsubscription;

/// The notifications of a user, in the inbox and over the other channels, whose event types are known to the user.
const RECEIVED_MAX: i64 = 100;
/// The event types of stored events that operators see.
const STORED_TYPES_MAX: i64 = 10_000;
/// The waiting e-mails that a change of quiet hours releases.
const RELEASED_MAX: i64 = 10_000;

/// A change of a user's preferences.
#[derive(Debug, Default)]
pub(crate) struct PreferenceChange {
    /// Whether preferences that the change does not name are deleted.
    pub(crate) replaces_all: bool,
    pub(crate) saved: Vec<Preference>,
    pub(crate) deleted: Vec<Preference>,
    /// None: they stay as they are.
    pub(crate) quiet: Option<Option<QuietHours>>,
}

pub(crate) async fn show(db: &Database, user: Uuid, default: &Rules) -> Result<ShownPreferences, Error> {
    // One snapshot: the version belongs to what is shown.
    let mut tx = db.begin().await?;
    let version = store::version_of(&mut tx, user).await?;
    let shown = shown(&mut tx, user, default, version).await?;
    tx.rollback().await?;
    Ok(shown)
}

async fn shown(
    tx: &mut Transaction<'_, Postgres>,
    user: Uuid,
    default: &Rules,
    version: Version,
) -> Result<ShownPreferences, Error> {
    let user_settings = store::load_users(tx, &[user]).await?.settings.remove(&user).unwrap_or_default();
    let mut names = store::event_type_names(tx).await?;
    names.extend(notification::BUILT_IN.map(str::to_owned));
    names.extend(user_settings.preferences.iter().map(|preference| preference.event_type.clone()));
    names.extend(store::received_types(tx, user, RECEIVED_MAX).await?);
    names.retain(|name| !name.is_empty());
    names.sort();
    names.dedup();
    let mut rules = store::rules_of(tx, &names, default).await?;
    let event_types = names.into_iter().filter_map(|name| rules.remove_entry(&name)).collect();
    Ok(ShownPreferences { user_settings, event_types, version })
}

/// The event types that a user, or an operator, may know, by name.
pub(crate) async fn event_types(db: &Database, user: Option<Uuid>, default: &Rules) -> Result<Vec<KnownType>, Error> {
    let mut db = db.acquire().await?;
    let with_rules: BTreeSet<String> = store::event_type_names(&mut db).await?.into_iter().collect();
    let stored = match user {
        Some(user) => store::received_types(&mut db, user, RECEIVED_MAX).await?,
        None => store::stored_types(&mut db, STORED_TYPES_MAX).await?,
    };
    let built_in = notification::BUILT_IN.map(str::to_owned);
    let names: BTreeSet<String> = with_rules.iter().cloned().chain(stored).chain(built_in).collect();
    let mut rules = store::rules_of(&mut db, &names.iter().cloned().collect::<Vec<_>>(), default).await?;
    let known = |name: String| {
        let has_rules = with_rules.contains(&name);
        rules.remove(&name).map(|rules| KnownType { name, rules, has_rules })
    };
    Ok(names.into_iter().filter_map(known).collect())
}

/// Changes preferences. E-mails that wait for the end of quiet hours that are removed or changed are due again; the delivery
/// checks the new ones. Fails if they have changed since `if_match`, if a critical event type would be muted, or if there
/// would be too many.
pub(crate) async fn change(
    tx: &mut Transaction<'_, Postgres>,
    user: Uuid,
    if_match: &IfMatch,
    change: &PreferenceChange,
    default: &Rules,
) -> Result<ShownPreferences, Error> {
    let version = store::lock(tx, user).await?;
    if_match.check(version.number, version.changed_at).map_err(Error::Stale)?;
    refuse_muted_critical(tx, &change.saved, default).await?;
    if change.replaces_all {
        store::delete_all(tx, user).await?;
    }
    store::delete(tx, user, &change.deleted).await?;
    store::save(tx, user, &change.saved).await?;
    if let Some(quiet) = &change.quiet {
        let old = store::load_users(tx, &[user]).await?.settings.remove(&user).and_then(|settings| settings.quiet);
        store::save_quiet_hours(tx, user, quiet.as_ref()).await?;
        if old.is_some() && old != *quiet {
            store::release_emails(tx, user, default.digest_minutes, RELEASED_MAX).await?;
        }
    }
    let version = store::advance_version(tx, user).await?;
    let shown = shown(tx, user, default, version).await?;
    if shown.user_settings.preferences.len() > PREFERENCES_MAX { Err(Error::TooManyPreferences) } else { Ok(shown) }
}

/// Mutes what the holder of a link may mute. Nothing is stored about a user who is not known any more. Fails if the event type
/// is critical by now, or if there would be too many preferences.
pub(crate) async fn unsubscribe(
    tx: &mut Transaction<'_, Postgres>,
    muted: Unsubscription,
    default: &Rules,
) -> Result<(), Error> {
    if !store::has_contact(tx, muted.user_id).await? {
        return Ok(());
    }
    store::lock(tx, muted.user_id).await?;
    let Unsubscription { user_id, event_type, channel } = muted;
    let preference = Preference { event_type, channel: Some(channel), enabled: false };
    let preferences = std::slice::from_ref(&preference);
    refuse_muted_critical(tx, preferences, default).await?;
    store::save(tx, user_id, preferences).await?;
    store::advance_version(tx, user_id).await?;
    let known = store::load_users(tx, &[user_id]).await?;
    match known.settings.get(&user_id).map_or(0, |user_settings| user_settings.preferences.len()) {
        ..=PREFERENCES_MAX => Ok(()),
        _ => Err(Error::TooManyPreferences),
    }
}

async fn refuse_muted_critical(
    tx: &mut Transaction<'_, Postgres>,
    preferences: &[Preference],
    default: &Rules,
) -> Result<(), Error> {
    let muted = preferences.iter().filter(|preference| !preference.enabled && !preference.event_type.is_empty());
    let names: Vec<String> = muted.map(|preference| preference.event_type.clone()).collect();
    let rules = store::rules_of(tx, &names, default).await?;
    match names.into_iter().find(|name| rules.get(name).is_some_and(|rules| rules.critical)) {
        Some(name) => Err(Error::CriticalEventType(name)),
        None => Ok(()),
    }
}

/// Returns the rules of an event type. Fails if none were set.
pub(crate) async fn event_type(db: &Database, name: &str) -> Result<StoredEventType, Error> {
    store::event_type(&mut *db.acquire().await?, name, false).await?.ok_or(Error::EventTypeNotFound)
}

/// Creates or replaces the rules of an event type. Fails if they have changed since `if_match`. Returns whether they are new.
pub(crate) async fn save_event_type(
    tx: &mut Transaction<'_, Postgres>,
    name: &str,
    if_match: &IfMatch,
    rules: &EventTypeRules,
) -> Result<(Version, bool), Error> {
    let old = store::event_type(tx, name, true).await?;
    let version = old.as_ref().map_or(Version::NONE, |old| old.version);
    if_match.check(version.number, version.changed_at).map_err(Error::Stale)?;
    Ok((store::save_event_type(tx, name, rules).await?, old.is_none()))
}

/// Deletes the rules of an event type, so that the default applies. Fails if there are none, or if they have changed since
/// `if_match`.
pub(crate) async fn delete_event_type(
    tx: &mut Transaction<'_, Postgres>,
    name: &str,
    if_match: &IfMatch,
) -> Result<(), Error> {
    let StoredEventType { version, .. } = store::event_type(tx, name, true).await?.ok_or(Error::EventTypeNotFound)?;
    if_match.check(version.number, version.changed_at).map_err(Error::Stale)?;
    Ok(store::delete_event_type(tx, name).await?)
}
