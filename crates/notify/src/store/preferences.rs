//! SQL of preferences, quiet hours, and the rules of event types.

use std::collections::{HashMap, HashSet};

use chrono::NaiveTime;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::delivery_rules::{Channel, Preference, QuietHours, Rules, UserSettings, Version};

/// The rules of an event type where they differ from the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EventTypeRules {
    pub(crate) critical: bool,
    pub(crate) channels: Option<Vec<Channel>>,
    pub(crate) digest_minutes: Option<u32>,
}

/// The rules of an event type as they are stored.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct StoredEventType {
    pub(crate) name: String,
    #[sqlx(flatten, try_from = "RulesColumns")]
    pub(crate) rules: EventTypeRules,
    #[sqlx(flatten)]
    pub(crate) version: Version,
}

#[derive(sqlx::FromRow)]
struct RulesColumns {
    critical: bool,
    channels: Option<Vec<String>>,
    digest_minutes: Option<i32>,
}

impl From<RulesColumns> for EventTypeRules {
    fn from(RulesColumns { critical, channels, digest_minutes }: RulesColumns) -> EventTypeRules {
        // A channel that this version does not know is ignored.
        let channels = channels.map(|names| names.iter().filter_map(|name| name.parse().ok()).collect());
        EventTypeRules { critical, channels, digest_minutes: digest_minutes.map(i32::unsigned_abs) }
    }
}

/// The data that decides whether users are notified.
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
    let rows: Vec<SettingRow> = sqlx::query_as(query).bind(users).fetch_all(db).await?;
    for row in rows {
        let user = row.user_id;
        match row.kind.as_str() {
            "preference" => known.settings.entry(user).or_default().preferences.extend(row.preference()),
            "quiet" => known.settings.entry(user).or_default().quiet = row.quiet_hours(),
            _ => {
                known.deleted.insert(user);
            }
        }
    }
    Ok(known)
}

/// One setting of a user. The columns of other kinds of settings are null.
#[derive(sqlx::FromRow)]
struct SettingRow {
    user_id: Uuid,
    kind: String,
    event_type: Option<String>,
    channel: Option<String>,
    enabled: Option<bool>,
    time_zone: Option<String>,
    quiet_from: Option<NaiveTime>,
    quiet_until: Option<NaiveTime>,
}

impl SettingRow {
    /// None for a channel that this version does not know: it would otherwise be taken for all channels.
    fn preference(self) -> Option<Preference> {
        let channel = match self.channel?.as_str() {
            "" => None,
            name => Some(name.parse().ok()?),
        };
        Some(Preference { event_type: self.event_type?, channel, enabled: self.enabled? })
    }

    /// None if the zone no longer exists: e-mails then do not wait.
    fn quiet_hours(self) -> Option<QuietHours> {
        Some(QuietHours { time_zone: self.time_zone?.parse().ok()?, from: self.quiet_from?, until: self.quiet_until? })
    }
}

/// Returns the rules of these event types; those without a row have the default.
pub(crate) async fn rules_of(
    db: &mut PgConnection,
    event_types: &[String],
    default: &Rules,
) -> sqlx::Result<HashMap<String, Rules>> {
    let mut rules: HashMap<String, Rules> = event_types.iter().map(|name| (name.clone(), default.clone())).collect();
    let query = "select * from pillarbox_notify.event_type where name = any($1)";
    let stored: Vec<StoredEventType> = sqlx::query_as(query).bind(event_types).fetch_all(db).await?;
    rules.extend(stored.into_iter().map(|stored| (stored.name, stored.rules.or_default(default))));
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

/// Returns the names of all event types for which rules were set.
pub(crate) async fn event_type_names(db: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar("select name from pillarbox_notify.event_type order by name").fetch_all(db).await
}

/// Returns an event type. With `lock`, no other transaction changes it until the end of this one.
pub(crate) async fn event_type(db: &mut PgConnection, name: &str, lock: bool) -> sqlx::Result<Option<StoredEventType>> {
    let query = if lock {
        "select * from pillarbox_notify.event_type where name = $1 for update"
    } else {
        "select * from pillarbox_notify.event_type where name = $1"
    };
    sqlx::query_as(query).bind(name).fetch_optional(db).await
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
    sqlx::query_as(query)
        .bind(name)
        .bind(rules.critical)
        .bind(channels)
        .bind(rules.digest_minutes.map(|minutes| i32::try_from(minutes).unwrap_or(i32::MAX)))
        .fetch_one(db)
        .await
}

pub(crate) async fn delete_event_type(db: &mut PgConnection, name: &str) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_notify.event_type where name = $1").bind(name).execute(db).await.map(drop)
}

/// Returns the version of a user's preferences.
pub(crate) async fn version_of(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Version> {
    let query = "select version, changed_at from pillarbox_notify.preference_set where user_id = $1";
    let version = sqlx::query_as(query).bind(user).fetch_optional(db).await?;
    Ok(version.unwrap_or(Version::NONE))
}

/// Locks the preferences of a user until the end of the transaction, also if there are none yet.
pub(crate) async fn lock(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Version> {
    let insert = "insert into pillarbox_notify.preference_set (user_id, version, changed_at)
                  values ($1, 0, to_timestamp(0)) on conflict do nothing";
    sqlx::query(insert).bind(user).execute(&mut *db).await?;
    let query = "select version, changed_at from pillarbox_notify.preference_set where user_id = $1 for update";
    sqlx::query_as(query).bind(user).fetch_one(db).await
}

/// Whether the user has a contact. No other transaction deletes it until the end of this one.
pub(crate) async fn has_contact(db: &mut PgConnection, user: Uuid) -> sqlx::Result<bool> {
    let query = "select user_id from pillarbox_notify.contact where user_id = $1 for key share";
    Ok(sqlx::query(query).bind(user).fetch_optional(db).await?.is_some())
}

/// Sets the version of changed preferences.
pub(crate) async fn advance_version(db: &mut PgConnection, user: Uuid) -> sqlx::Result<Version> {
    let query = "update pillarbox_notify.preference_set set version = version + 1, changed_at = clock_timestamp()
                 where user_id = $1 returning version, changed_at";
    sqlx::query_as(query).bind(user).fetch_one(db).await
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
