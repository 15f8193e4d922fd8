//! SQL of preferences, quiet hours, and the rules of event types.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, NaiveTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::domain::delivery_rules::{Channel, Preference, QuietHours, Rules, UserSettings};

/// The version of a row and the time of its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) number: i64,
    pub(crate) changed_at: DateTime<Utc>,
}

impl Version {
    /// The version of something that nobody has set.
    pub(crate) const NONE: Version = Version { number: 0, changed_at: DateTime::UNIX_EPOCH };
}

/// The rules of an event type where they differ from the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EventTypeRules {
    pub(crate) critical: bool,
    pub(crate) channels: Option<Vec<Channel>>,
    pub(crate) digest_minutes: Option<u32>,
}

/// What decides whether users are notified.
#[derive(Debug, Default)]
pub(crate) struct KnownUsers {
    /// Users who have set nothing are absent.
    pub(crate) settings: HashMap<Uuid, UserSettings>,
    /// The users whose accounts are deleted.
    pub(crate) deleted: HashSet<Uuid>,
}

/// Returns what these users want, each in the order of event types and channels, and whose accounts are deleted.
pub(crate) async fn load_users(db: &mut PgConnection, users: &[Uuid]) -> sqlx::Result<KnownUsers> {
    let query = "select user_id, 'preference' as kind, event_type, channel, enabled, null as time_zone,
                        null::time as quiet_from, null::time as quiet_until
                 from pillarbox_notify.preference where user_id = any($1)
                 union all
                 select user_id, 'quiet', null, null, null, time_zone, quiet_from, quiet_until
                 from pillarbox_notify.quiet_hours where user_id = any($1)
                 union all
                 select user_id, 'deleted', null, null, null, null, null, null
                 from pillarbox_notify.deleted_account where user_id = any($1)
                 order by user_id, event_type, channel";
    let mut known = KnownUsers::default();
    for row in sqlx::query(query).bind(users).fetch_all(db).await? {
        let user = row.try_get("user_id")?;
        match row.try_get::<&str, _>("kind")? {
            "preference" => known.settings.entry(user).or_default().preferences.extend(preference(&row)?),
            "quiet" => known.settings.entry(user).or_default().quiet = quiet_hours(&row)?,
            _ => {
                known.deleted.insert(user);
            }
        }
    }
    Ok(known)
}

/// Returns the rules of these event types; those without a row have the default.
pub(crate) async fn rules_of(
    db: &mut PgConnection,
    event_types: &[String],
    default: &Rules,
) -> sqlx::Result<HashMap<String, Rules>> {
    let mut rules: HashMap<String, Rules> = event_types.iter().map(|name| (name.clone(), default.clone())).collect();
    let query = "select * from pillarbox_notify.event_type where name = any($1)";
    for row in sqlx::query(query).bind(event_types).fetch_all(db).await? {
        rules.insert(row.try_get("name")?, event_type_rules(&row)?.or_default(default));
    }
    Ok(rules)
}

impl EventTypeRules {
    pub(crate) fn or_default(self, default: &Rules) -> Rules {
        Rules {
            critical: self.critical,
            channels: self.channels.unwrap_or_else(|| default.channels.clone()),
            digest_minutes: self.digest_minutes.unwrap_or(default.digest_minutes),
        }
    }
}

/// Returns the names of all event types that have rules of their own.
pub(crate) async fn event_type_names(db: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar("select name from pillarbox_notify.event_type order by name").fetch_all(db).await
}

/// Returns an event type; with `lock`, until the end of the transaction nobody else changes it.
pub(crate) async fn event_type(
    db: &mut PgConnection,
    name: &str,
    lock: bool,
) -> sqlx::Result<Option<(EventTypeRules, Version)>> {
    let query = match lock {
        true => "select * from pillarbox_notify.event_type where name = $1 for update",
        false => "select * from pillarbox_notify.event_type where name = $1",
    };
    let row = sqlx::query(query).bind(name).fetch_optional(db).await?;
    row.map(|row| Ok((event_type_rules(&row)?, version(&row)?))).transpose()
}

/// Creates or replaces the rules of an event type. Returns its new version.
pub(crate) async fn save_event_type(
    db: &mut PgConnection,
    name: &str,
    rules: &EventTypeRules,
) -> sqlx::Result<Version> {
    let query = "insert into pillarbox_notify.event_type as old (name, critical, channels, digest_minutes, changed_at)
                 values ($1, $2, $3, $4, clock_timestamp())
                 on conflict (name) do update set critical = excluded.critical, channels = excluded.channels,
                     digest_minutes = excluded.digest_minutes, version = old.version + 1,
                     changed_at = excluded.changed_at
                 returning version, changed_at";
    let channels: Option<Vec<&str>> =
        rules.channels.as_ref().map(|channels| channels.iter().map(|channel| <&str>::from(*channel)).collect());
    let row = sqlx::query(query)
        .bind(name)
        .bind(rules.critical)
        .bind(channels)
        .bind(rules.digest_minutes.map(|minutes| i32::try_from(minutes).unwrap_or(i32::MAX)))
        .fetch_one(db)
        .await?;
    version(&row)
}

pub(crate) async fn delete_event_type(db: &mut PgConnection, name: &str) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_notify.event_type where name = $1").bind(name).execute(db).await.map(drop)
}

/// Returns the version of a user's preferences.
pub(crate) async fn version_of(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Version> {
    let query = "select version, changed_at from pillarbox_notify.preference_set where user_id = $1";
    let row = sqlx::query(query).bind(user).fetch_optional(db).await?;
    row.map_or(Ok(Version::NONE), |row| version(&row))
}

/// Locks the preferences of a user until the end of the transaction, also if there are none yet.
pub(crate) async fn lock(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Version> {
    let insert = "insert into pillarbox_notify.preference_set (user_id, version, changed_at)
                  values ($1, 0, to_timestamp(0)) on conflict do nothing";
    sqlx::query(insert).bind(user).execute(&mut *db).await?;
    let query = "select version, changed_at from pillarbox_notify.preference_set where user_id = $1 for update";
    version(&sqlx::query(query).bind(user).fetch_one(db).await?)
}

/// Whether the user has a contact. Until the end of the transaction nobody deletes it.
pub(crate) async fn has_contact(db: &mut PgConnection, user: Uuid) -> sqlx::Result<bool> {
    let query = "select user_id from pillarbox_notify.contact where user_id = $1 for key share";
    Ok(sqlx::query(query).bind(user).fetch_optional(db).await?.is_some())
}

/// Sets the version of changed preferences.
pub(crate) async fn advance_version(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Version> {
    let query = "update pillarbox_notify.preference_set set version = version + 1, changed_at = clock_timestamp()
                 where user_id = $1 returning version, changed_at";
    version(&sqlx::query(query).bind(user).fetch_one(db).await?)
}

/// Inserts or changes preferences.
pub(crate) async fn save(db: &mut PgConnection, user: Uuid, preferences: &[Preference]) -> sqlx::Result<()> {
    let query = "insert into pillarbox_notify.preference (user_id, event_type, channel, enabled)
                 select $1, * from unnest($2::text[], $3::text[], $4::bool[])
                 on conflict (user_id, event_type, channel) do update set enabled = excluded.enabled";
    sqlx::query(query)
        .bind(user)
        .bind(preferences.iter().map(|preference| preference.event_type.clone()).collect::<Vec<_>>())
        .bind(preferences.iter().map(channel_text).collect::<Vec<_>>())
        .bind(preferences.iter().map(|preference| preference.enabled).collect::<Vec<_>>())
        .execute(db)
        .await
        .map(drop)
}

/// Deletes the preferences with these types and channels.
pub(crate) async fn delete(db: &mut PgConnection, user: Uuid, preferences: &[Preference]) -> sqlx::Result<()> {
    let query = "delete from pillarbox_notify.preference old
                 using unnest($2::text[], $3::text[]) as removed (event_type, channel)
                 where old.user_id = $1 and old.event_type = removed.event_type and old.channel = removed.channel";
    sqlx::query(query)
        .bind(user)
        .bind(preferences.iter().map(|preference| preference.event_type.clone()).collect::<Vec<_>>())
        .bind(preferences.iter().map(channel_text).collect::<Vec<_>>())
        .execute(db)
        .await
        .map(drop)
}

/// Deletes all preferences of a user. Quiet hours stay.
pub(crate) async fn delete_all(db: &mut PgConnection, user: Uuid) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_notify.preference where user_id = $1").bind(user).execute(db).await.map(drop)
}

/// Sets or deletes the quiet hours of a user.
pub(crate) async fn save_quiet_hours(
    db: &mut PgConnection,
    user: Uuid,
    quiet: Option<&QuietHours>,
) -> sqlx::Result<()> {
    let Some(quiet) = quiet else {
        let delete = "delete from pillarbox_notify.quiet_hours where user_id = $1";
        return sqlx::query(delete).bind(user).execute(db).await.map(drop);
    };
    let query = "insert into pillarbox_notify.quiet_hours (user_id, time_zone, quiet_from, quiet_until)
                 values ($1, $2, $3, $4)
                 on conflict (user_id) do update set time_zone = excluded.time_zone,
                     quiet_from = excluded.quiet_from, quiet_until = excluded.quiet_until";
    sqlx::query(query)
        .bind(user)
        .bind(quiet.time_zone.name())
        .bind(quiet.from)
        .bind(quiet.until)
        .execute(db)
        .await
        .map(drop)
}

/// Makes the waiting e-mails of a user due when their digests are, or now, up to `limit` of them. Those that failed wait for their
/// retry, and those that another transaction has locked stay as they are: waiting for them could be a deadlock.
pub(crate) async fn release_emails(
    db: &mut PgConnection,
    user: Uuid,
    digest_minutes: u32,
    limit: i64,
) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.notification target set due_at = released.due_at
                 from (
                     select n.id, greatest(statement_timestamp(), n.created_at + interval '1 minute' *
                         case when rules.critical then 0 else coalesce(rules.digest_minutes, $2) end) as due_at
                     from pillarbox_notify.notification n
                     join pillarbox_notify.business_event e on e.id = n.event_id
                     left join pillarbox_notify.event_type rules on rules.name = e.event_type
                     where n.user_id = $1 and n.channel = 'email' and n.channel <> 'in_app' and n.status = 'waiting'
                         and n.attempts = 0 and n.last_error is null and n.due_at > statement_timestamp()
                     order by n.id limit $3 for update of n skip locked
                 ) released
                 where target.id = released.id and released.due_at < target.due_at";
    let digest_minutes = i32::try_from(digest_minutes).unwrap_or(i32::MAX);
    sqlx::query(query).bind(user).bind(digest_minutes).bind(limit).execute(db).await.map(drop)
}

/// Returns the event types of the latest notifications of a user: up to `limit` in the inbox, and as many over the other
/// channels.
pub(crate) async fn received_types(db: &mut PgConnection, user: Uuid, limit: i64) -> sqlx::Result<Vec<String>> {
    let query = "select distinct e.event_type from (
                     (select event_id from pillarbox_notify.notification
                      where user_id = $1 and channel = 'in_app' order by seq desc limit $2)
                     union all
                     (select event_id from pillarbox_notify.notification
                      where user_id = $1 and channel <> 'in_app' limit $2)
                 ) n join pillarbox_notify.business_event e on e.id = n.event_id";
    sqlx::query_scalar(query).bind(user).bind(limit).fetch_all(db).await
}

/// Returns the event types of the stored events, up to `limit`. The cost depends on the number of types, not of events.
pub(crate) async fn stored_types(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<String>> {
    let query = "with recursive types (name) as (
                     (select event_type from pillarbox_notify.business_event order by event_type limit 1)
                     union all
                     select (select event_type from pillarbox_notify.business_event
                             where event_type > types.name order by event_type limit 1)
                     from types where types.name is not null
                 )
                 select name from types where name is not null limit $1";
    sqlx::query_scalar(query).bind(limit).fetch_all(db).await
}

fn channel_text(preference: &Preference) -> &'static str {
    preference.channel.map(<&str>::from).unwrap_or_default()
}

/// None for a channel that this version does not know: it would otherwise be taken for all channels.
fn preference(row: &PgRow) -> sqlx::Result<Option<Preference>> {
    let channel: &str = row.try_get("channel")?;
    let channel = match channel {
        "" => None,
        name => match name.parse() {
            Ok(channel) => Some(channel),
            Err(_) => return Ok(None),
        },
    };
    Ok(Some(Preference { event_type: row.try_get("event_type")?, channel, enabled: row.try_get("enabled")? }))
}

/// None if the zone no longer exists: e-mails then do not wait.
fn quiet_hours(row: &PgRow) -> sqlx::Result<Option<QuietHours>> {
    let (from, until): (NaiveTime, NaiveTime) = (row.try_get("quiet_from")?, row.try_get("quiet_until")?);
    let time_zone = row.try_get::<&str, _>("time_zone")?.parse().ok();
    Ok(time_zone.map(|time_zone| QuietHours { time_zone, from, until }))
}

fn event_type_rules(row: &PgRow) -> sqlx::Result<EventTypeRules> {
    let channels: Option<Vec<String>> = row.try_get("channels")?;
    // A channel that this version does not know is ignored.
    let channels = channels.map(|channels| channels.iter().filter_map(|name| name.parse().ok()).collect());
    let digest_minutes: Option<i32> = row.try_get("digest_minutes")?;
    Ok(EventTypeRules {
        critical: row.try_get("critical")?,
        channels,
        digest_minutes: digest_minutes.map(i32::unsigned_abs),
    })
}

pub(super) fn channel_of(name: &str) -> sqlx::Result<Channel> {
    name.parse().map_err(|error: strum::ParseError| sqlx::Error::Decode(error.into()))
}

fn version(row: &PgRow) -> sqlx::Result<Version> {
    Ok(Version { number: row.try_get("version")?, changed_at: row.try_get("changed_at")? })
}
