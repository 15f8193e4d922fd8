//! SQL for the directory: which subscribers there are, and what each of them matches.

pub(crate) mod dispatchers;

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use pillarbox::database::Incarnation;
use pillarbox::log::Tenant;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgHasArrayType, PgTypeInfo, PgValueRef};
use sqlx::{Decode, PgConnection, Postgres, Type};
use uuid::Uuid;

use crate::directory::domain::{Backfill, DirectoryVersion, EventTypes, Filter, Interest};

/// Returns a version that grows with each change to any subscriber or secret. Read it before loading subscribers: a
/// change in between then causes another load.
pub(crate) async fn directory_version(db: &mut PgConnection) -> sqlx::Result<DirectoryVersion> {
    let query = "select version, (select id from pillarbox.incarnation) as incarnation from pillarbox_hub.directory";
    sqlx::query_as(query).fetch_one(db).await.map(VersionColumns::into)
}

/// The columns of the version of the directory.
#[derive(sqlx::FromRow)]
pub(crate) struct VersionColumns {
    version: i64,
    incarnation: Option<Uuid>,
}

impl From<VersionColumns> for DirectoryVersion {
    fn from(row: VersionColumns) -> DirectoryVersion {
        DirectoryVersion { incarnation: row.incarnation.map(Incarnation::from), count: row.version }
    }
}

/// An [`Interest`] as its query returns it.
#[derive(sqlx::FromRow)]
pub(crate) struct InterestRow {
    subscriber: Uuid,
    is_stream: bool,
    #[sqlx(try_from = "String")]
    tenant: Tenant,
    event_types: Vec<EventTypes>,
    #[sqlx(json(nullable))]
    filter: Option<Filter>,
    ordering_key: Option<String>,
    is_active: bool,
    since: DateTime<Utc>,
    /// -1 while the backfill is active.
    backfill: Option<i64>,
}

impl From<InterestRow> for Interest {
    fn from(row: InterestRow) -> Interest {
        let backfill = row.backfill.map(|deferred_to| match deferred_to {
            -1 => Backfill::Active,
            deferred_to => Backfill::Ended { deferred_to },
        });
        let InterestRow { subscriber, is_stream, tenant, event_types, filter, ordering_key, is_active, since, .. } =
            row;
        Interest { subscriber, is_stream, tenant, event_types, filter, ordering_key, is_active, since, backfill }
    }
}

/// Returns the matching rules of all subscribers, or of those of a tenant. It decrypts nothing, so that a subscriber that cannot be decrypted
/// still gets messages, which wait for it.
pub(crate) async fn load_interests(db: &mut PgConnection, of: Option<&Tenant>) -> sqlx::Result<Vec<Interest>> {
    let query =
        "select subscriber.id as subscriber, false as is_stream, subscriber.tenant, subscriber.event_types, subscriber.filter, ordering_key, is_active,
                        subscriber.created_at as since,
                        case when backfill.id is null then null when backfill.ended_at is null then -1
                             else coalesce(backfill.deferred_to, 0) end as backfill
                 from pillarbox_hub.subscriber
                 left join pillarbox_hub.replay as backfill
                      on backfill.subscriber = subscriber.id and backfill.kind = 'backfill'
                 where $1::text is null or subscriber.tenant = $1
                 order by subscriber.id";
    let rows: Vec<InterestRow> = sqlx::query_as(query).bind(of.map(Tenant::as_str)).fetch_all(db).await?;
    Ok(rows.into_iter().map(Interest::from).collect())
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

impl Type<Postgres> for EventTypes {
    fn type_info() -> PgTypeInfo {
        <String as Type<Postgres>>::type_info()
    }

    fn compatible(ty: &PgTypeInfo) -> bool {
        <String as Type<Postgres>>::compatible(ty)
    }
}

impl PgHasArrayType for EventTypes {
    fn array_type_info() -> PgTypeInfo {
        String::array_type_info()
    }
}

impl Decode<'_, Postgres> for EventTypes {
    fn decode(value: PgValueRef<'_>) -> Result<EventTypes, BoxDynError> {
        Ok(EventTypes::try_from(<String as Decode<Postgres>>::decode(value)?)?)
    }
}

/// The error for a row that another version wrote, or that is encrypted with an unknown key.
pub(crate) fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> sqlx::Error {
    sqlx::Error::Decode(error.into())
}
