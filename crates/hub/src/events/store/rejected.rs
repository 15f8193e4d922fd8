//! Events that were posted in SQL and rejected.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use http_kit::problem::FieldError;
use pillarbox::log::LogRef;
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use crate::events::store::EventFilter;
use crate::rows::LogColumns;

/// An event to reject.
#[derive(Debug)]
pub(crate) struct NewRejection {
    pub(crate) log_ref: LogRef,
    pub(crate) tenant: String,
    pub(crate) message_id: Uuid,
    pub(crate) event_type: String,
    pub(crate) version: Option<i32>,
    pub(crate) errors: Vec<FieldError>,
}

/// An error as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredError {
    pointer: String,
    detail: String,
}

#[derive(Deserialize)]
struct StoredErrors(Vec<StoredError>);

impl From<StoredErrors> for Vec<FieldError> {
    fn from(StoredErrors(errors): StoredErrors) -> Vec<FieldError> {
        errors.into_iter().map(|error| FieldError::body(error.pointer, error.detail)).collect()
    }
}

/// A rejected event.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct Rejection {
    #[sqlx(flatten, try_from = "LogColumns")]
    pub(crate) log_ref: LogRef,
    pub(crate) message_id: Uuid,
    pub(crate) event_type: String,
    pub(crate) version: Option<i32>,
    #[sqlx(json, try_from = "StoredErrors")]
    pub(crate) errors: Vec<FieldError>,
    pub(crate) rejected_at: DateTime<Utc>,
}

/// Inserts rejections. An event that has one keeps it.
pub(crate) async fn insert(tx: &mut PgConnection, new: &[NewRejection], now: DateTime<Utc>) -> sqlx::Result<()> {
    if new.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.rejected_event
                     (log_id, log_shard, log_at, tenant, message_id, event_type, version, errors, rejected_at)
                 select r.*, $9 from unnest($1::bigint[], $2::smallint[], $3::timestamptz[], $4::text[], $5::uuid[], $6::text[],
                     $7::integer[], $8::json[]) as r
                 on conflict do nothing";
    sqlx::query(query)
        .bind(new.iter().map(|new| new.log_ref.id).collect::<Vec<_>>())
        .bind(new.iter().map(|new| new.log_ref.shard).collect::<Vec<_>>())
        .bind(new.iter().map(|new| new.log_ref.at).collect::<Vec<_>>())
        .bind(new.iter().map(|new| new.tenant.as_str()).collect::<Vec<_>>())
        .bind(new.iter().map(|new| new.message_id).collect::<Vec<_>>())
        .bind(new.iter().map(|new| new.event_type.as_str()).collect::<Vec<_>>())
        .bind(new.iter().map(|new| new.version).collect::<Vec<_>>())
        .bind(new.iter().map(stored_errors).collect::<Vec<_>>())
        .bind(now)
        .execute(tx)
        .await
        .map(drop)
}

const COLUMNS: &str = "log_id, log_shard, log_at, message_id, event_type, version, errors, rejected_at";

/// The rejected events of a tenant with an id in the log below `before`, newest first.
pub(crate) async fn list(
    db: &mut PgConnection,
    tenant: &Tenant,
    filter: &EventFilter,
    before: Option<i64>,
    limit: i64,
) -> sqlx::Result<Vec<Rejection>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.rejected_event
         where tenant = $1 and accepted_at is null and log_id < $2
           and ($3::text is null or event_type = $3 or starts_with(event_type, $3 || '.'))
           and log_at >= coalesce($4, '-infinity') and log_at < coalesce($5, 'infinity')
         order by log_id desc limit $6"
    );
    let query = sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(before.unwrap_or(i64::MAX));
    query.bind(&filter.event_type).bind(filter.from).bind(filter.to).bind(limit).fetch_all(db).await
}

/// The rejected events of a type, and of all types below it, with an id in the log above `after`, oldest first.
pub(crate) async fn oldest(
    db: &mut PgConnection,
    tenant: &Tenant,
    event_type: &str,
    after: Option<i64>,
    limit: i64,
) -> sqlx::Result<Vec<LogRef>> {
    let query = "select log_id, log_shard, log_at from pillarbox_hub.rejected_event
                 where tenant = $1 and accepted_at is null and log_id > $2
                   and (event_type = $3 or starts_with(event_type, $3 || '.'))
                 order by log_id limit $4";
    let query = sqlx::query_as(query).bind(tenant.as_str()).bind(after.unwrap_or(0)).bind(event_type).bind(limit);
    Ok(query.fetch_all(db).await?.into_iter().map(LogColumns::into).collect())
}

/// The rejection of an event that was not accepted since.
pub(crate) async fn find(db: &mut PgConnection, tenant: &Tenant, log_id: i64) -> sqlx::Result<Option<Rejection>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.rejected_event where log_id = $1 and tenant = $2 and accepted_at is null"
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(log_id).bind(tenant.as_str()).fetch_optional(db).await
}

/// When these events were accepted after they were rejected, by their ids in the log; None: not yet. Events that were never
/// rejected are missing.
pub(crate) async fn among(db: &mut PgConnection, log_ids: &[i64]) -> sqlx::Result<HashMap<i64, Option<DateTime<Utc>>>> {
    if log_ids.is_empty() {
        return Ok(HashMap::new());
    }
    let query = "select log_id, accepted_at from pillarbox_hub.rejected_event where log_id = any ($1)";
    Ok(sqlx::query_as(query).bind(log_ids).fetch_all(db).await?.into_iter().collect())
}

/// Notes that rejected events of a tenant are accepted after all. Returns those that were not accepted before, in the order of the
/// log.
pub(crate) async fn accept(
    tx: &mut PgConnection,
    tenant: &Tenant,
    log_ids: &[i64],
    now: DateTime<Utc>,
) -> sqlx::Result<Vec<LogRef>> {
    // Locked in one order, so that two requests cannot deadlock.
    let query = "with rejected as materialized (
                     select log_id from pillarbox_hub.rejected_event
                     where tenant = $1 and log_id = any ($2) and accepted_at is null order by log_id for update)
                 update pillarbox_hub.rejected_event as r set accepted_at = $3 from rejected
                 where r.log_id = rejected.log_id
                 returning r.log_id, r.log_shard, r.log_at";
    let rows: Vec<LogColumns> =
        sqlx::query_as(query).bind(tenant.as_str()).bind(log_ids).bind(now).fetch_all(tx).await?;
    let mut accepted: Vec<LogRef> = rows.into_iter().map(LogRef::from).collect();
    accepted.sort_unstable_by_key(|log_ref| log_ref.id);
    Ok(accepted)
}

/// Deletes at most `limit` rejections of events that were posted before a time. Returns how many.
pub(crate) async fn delete_before(tx: &mut PgConnection, before: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_hub.rejected_event
                 where log_id in (select log_id from pillarbox_hub.rejected_event where log_at < $1 order by log_at limit $2)";
    Ok(sqlx::query(query).bind(before).bind(limit).execute(tx).await?.rows_affected())
}

fn stored_errors(new: &NewRejection) -> Json<Vec<StoredError>> {
    let stored = |error: &FieldError| StoredError { pointer: error.pointer.clone(), detail: error.detail.clone() };
    Json(new.errors.iter().map(stored).collect())
}
