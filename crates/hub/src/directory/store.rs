//! SQL for the directory: which subscribers there are, and what each of them matches.

pub(crate) mod dispatchers;

use std::collections::HashMap;

use pillarbox::database::Incarnation;
use pillarbox::log::Tenant;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::directory::domain::{Backfill, DirectoryVersion, EventTypes, Filter, Interest};

/// Returns a version that grows with each change to any subscriber or secret. Read it before loading subscribers: a
/// change in between then causes another load.
pub(crate) async fn directory_version(db: &mut PgConnection) -> sqlx::Result<DirectoryVersion> {
    let query = "select version, (select id from pillarbox.incarnation) as incarnation from pillarbox_hub.directory";
    version_of(&sqlx::query(query).fetch_one(db).await?)
}

/// The version of the directory in a row with the columns `version` and `incarnation`.
pub(crate) fn version_of(row: &PgRow) -> sqlx::Result<DirectoryVersion> {
    let incarnation: Option<Uuid> = row.try_get("incarnation")?;
    Ok(DirectoryVersion { incarnation: incarnation.map(Incarnation::from), count: row.try_get("version")? })
}

/// Returns the matching rules of all subscribers, or of those of a tenant. It decrypts nothing, so that a subscriber that cannot be decrypted
/// still gets messages, which wait for it.
pub(crate) async fn load_interests(db: &mut PgConnection, of: Option<&Tenant>) -> sqlx::Result<Vec<Interest>> {
    // `backfill` is -1 while the backfill is active.
    let query =
        "select subscriber.id, subscriber.tenant, subscriber.event_types, subscriber.filter, ordering_key, is_active,
                        subscriber.created_at,
                        case when backfill.id is null then null when backfill.ended_at is null then -1
                             else coalesce(backfill.deferred_to, 0) end as backfill
                 from pillarbox_hub.subscriber
                 left join pillarbox_hub.replay as backfill
                      on backfill.subscriber = subscriber.id and backfill.kind = 'backfill'
                 where $1::text is null or subscriber.tenant = $1
                 order by subscriber.id";
    let rows = sqlx::query(query).bind(of.map(Tenant::as_str)).fetch_all(db).await?;
    let interest = |row: &PgRow| {
        Ok(Interest {
            subscriber: row.try_get("id")?,
            is_stream: false,
            tenant: tenant(row)?,
            event_types: event_types(row)?,
            filter: filter(row)?,
            ordering_key: row.try_get("ordering_key")?,
            is_active: row.try_get("is_active")?,
            since: row.try_get("created_at")?,
            backfill: row.try_get::<Option<i64>, _>("backfill")?.map(|deferred_to| match deferred_to {
                -1 => Backfill::Active,
                deferred_to => Backfill::Ended { deferred_to },
            }),
        })
    };
    rows.iter().map(interest).collect()
}

/// Returns whether the tenant has this subscriber.
pub(crate) async fn exists(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<bool> {
    sqlx::query_scalar("select exists (select from pillarbox_hub.subscriber where id = $1 and tenant = $2)")
        .bind(id)
        .bind(tenant.as_str())
        .fetch_one(db)
        .await
}

/// The names of those of these subscribers that exist.
pub(crate) async fn names(db: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<HashMap<Uuid, String>> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let query = "select id, name from pillarbox_hub.subscriber where id = any ($1)";
    let rows: Vec<(Uuid, String)> = sqlx::query_as(query).bind(ids).fetch_all(db).await?;
    Ok(rows.into_iter().collect())
}

pub(crate) fn tenant(row: &PgRow) -> sqlx::Result<Tenant> {
    row.try_get::<&str, _>("tenant")?.parse().map_err(unreadable)
}

pub(crate) fn event_types(row: &PgRow) -> sqlx::Result<Vec<EventTypes>> {
    let event_types: Vec<String> = row.try_get("event_types")?;
    event_types.into_iter().map(EventTypes::try_from).collect::<Result<_, _>>().map_err(unreadable)
}

pub(crate) fn filter(row: &PgRow) -> sqlx::Result<Option<Filter>> {
    Ok(row.try_get::<Option<Json<Filter>>, _>("filter")?.map(|Json(filter)| filter))
}

/// The error for a row that another version wrote, or that is encrypted with an unknown key.
pub(crate) fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> sqlx::Error {
    sqlx::Error::Decode(error.into())
}
