//! Hub events whose fan-out is deferred, because their tenant had more than its share.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use mailbox::log::LogRef;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

/// An event to defer.
#[derive(Debug)]
pub(crate) struct NewDeferred {
    pub(crate) tenant: String,
    pub(crate) log_ref: LogRef,
    /// The number of matching subscribers.
    pub(crate) matches: usize,
}

/// A deferred event.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeferredEvent {
    pub(crate) id: i64,
    pub(crate) log_ref: LogRef,
    pub(crate) matches: usize,
    /// The matching subscribers up to this one have their hub message. None: none has.
    pub(crate) after: Option<Uuid>,
}

/// Inserts the events. Their ids have the order of `events`.
pub(crate) async fn insert(tx: &mut PgConnection, events: &[NewDeferred]) -> sqlx::Result<()> {
    if events.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.deferred_event (tenant, log_shard, log_id, log_at, matches)
                 select d.tenant, d.log_shard, d.log_id, d.log_at, d.matches
                 from unnest($1::text[], $2::smallint[], $3::bigint[], $4::timestamptz[], $5::integer[])
                      with ordinality as d (tenant, log_shard, log_id, log_at, matches, ordinal)
                 order by d.ordinal";
    sqlx::query(query)
        .bind(events.iter().map(|event| event.tenant.as_str()).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.log_ref.shard).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.log_ref.id).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.log_ref.at).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.matches as i32).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map(drop)
}

/// The tenants with deferred events.
pub(crate) async fn tenants(tx: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    // From tenant to tenant along the primary key: the cost does not depend on the number of events.
    sqlx::query_scalar(
        "with recursive deferred (tenant) as (
             (select tenant from pillarbox_hub.deferred_event order by tenant limit 1)
             union all
             select (select tenant from pillarbox_hub.deferred_event
                     where deferred_event.tenant > deferred.tenant order by tenant limit 1)
             from deferred where deferred.tenant is not null)
         select tenant from deferred where tenant is not null",
    )
    .fetch_all(tx)
    .await
}

/// The first events of a tenant with an id above `above`, at most `limit`.
pub(crate) async fn next(
    tx: &mut PgConnection,
    tenant: &str,
    above: i64,
    limit: usize,
) -> sqlx::Result<Vec<DeferredEvent>> {
    let query = "select id, log_shard, log_id, log_at, matches, after from pillarbox_hub.deferred_event
                 where tenant = $1 and id > $2 order by id limit $3";
    let rows = sqlx::query(query).bind(tenant).bind(above).bind(limit as i64).fetch_all(tx).await?;
    let event = |row: &PgRow| {
        Ok(DeferredEvent {
            id: row.try_get("id")?,
            log_ref: LogRef {
                shard: row.try_get("log_shard")?,
                id: row.try_get("log_id")?,
                at: row.try_get("log_at")?,
            },
            matches: row.try_get::<i32, _>("matches")?.unsigned_abs() as usize,
            after: row.try_get("after")?,
        })
    };
    rows.iter().map(event).collect()
}

/// Deletes the events of a tenant up to the id `done`, and saves how far the event after them has come.
pub(crate) async fn advance(
    tx: &mut PgConnection,
    tenant: &str,
    done: i64,
    partial: Option<(i64, Uuid)>,
) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.deferred_event where tenant = $1 and id <= $2";
    sqlx::query(query).bind(tenant).bind(done).execute(&mut *tx).await?;
    if let Some((id, after)) = partial {
        let query = "update pillarbox_hub.deferred_event set after = $3 where tenant = $1 and id = $2";
        sqlx::query(query).bind(tenant).bind(id).bind(after).execute(tx).await?;
    }
    Ok(())
}

/// Which of these events, by their ids in the log, are deferred, at least for some subscribers.
pub(crate) async fn among(db: &mut PgConnection, log_ids: &[i64]) -> sqlx::Result<HashSet<i64>> {
    let query = "select log_id from pillarbox_hub.deferred_event where log_id = any ($1)";
    Ok(sqlx::query_scalar(query).bind(log_ids).fetch_all(db).await?.into_iter().collect())
}

/// Deletes the deferred events that were posted before a time; None: all. Returns how many.
pub(crate) async fn delete_before(tx: &mut PgConnection, before: Option<DateTime<Utc>>) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_hub.deferred_event where $1::timestamptz is null or log_at < $1";
    Ok(sqlx::query(query).bind(before).execute(tx).await?.rows_affected())
}

/// The number of deferred events.
pub(crate) async fn count(db: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("select count(*) from pillarbox_hub.deferred_event").fetch_one(db).await
}
