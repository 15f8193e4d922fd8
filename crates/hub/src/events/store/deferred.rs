//! Hub events whose fan-out is deferred, because their tenant had more than its share.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use pillarbox::log::LogRef;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::rows::LogColumns;

/// An event to defer.
#[derive(Debug)]
pub(crate) struct NewDeferred {
    pub(crate) tenant: String,
    pub(crate) log_ref: LogRef,
    /// The number of matching subscribers.
    pub(crate) matches: usize,
    /// Whether it is known to be accepted.
    pub(crate) is_checked: bool,
}

/// A deferred event.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub(crate) struct DeferredEvent {
    pub(crate) id: i64,
    #[sqlx(flatten, try_from = "LogColumns")]
    pub(crate) log_ref: LogRef,
    #[sqlx(try_from = "i32")]
    pub(crate) matches: usize,
    /// The matching subscribers up to this one have their hub message. None: none has.
    pub(crate) after: Option<Uuid>,
    /// Whether it is known to be accepted.
    pub(crate) is_checked: bool,
    /// When it was accepted, if it was rejected at first.
    pub(crate) accepted_at: Option<DateTime<Utc>>,
}

/// Inserts the events. Their ids have the order of `events`.
pub(crate) async fn insert(tx: &mut PgConnection, events: &[NewDeferred]) -> sqlx::Result<()> {
    if events.is_empty() {
        return Ok(());
    }
    let query = "insert into pillarbox_hub.deferred_event (tenant, log_shard, log_id, log_at, matches, is_checked)
                 select d.tenant, d.log_shard, d.log_id, d.log_at, d.matches, d.is_checked
                 from unnest($1::text[], $2::smallint[], $3::bigint[], $4::timestamptz[], $5::integer[], $6::boolean[])
                      with ordinality as d (tenant, log_shard, log_id, log_at, matches, is_checked, ordinal)
                 order by d.ordinal";
    sqlx::query(query)
        .bind(events.iter().map(|event| event.tenant.as_str()).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.log_ref.shard).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.log_ref.id).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.log_ref.at).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.matches as i32).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.is_checked).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map(drop)
}

/// Inserts events that were rejected and are accepted now, behind the other deferred events of their tenant.
pub(crate) async fn insert_accepted(
    tx: &mut PgConnection,
    tenant: &str,
    events: &[LogRef],
    accepted_at: DateTime<Utc>,
) -> sqlx::Result<()> {
    let query =
        "insert into pillarbox_hub.deferred_event (tenant, log_shard, log_id, log_at, matches, is_checked, accepted_at)
                 select $1, d.log_shard, d.log_id, d.log_at, 1, true, $5
                 from unnest($2::smallint[], $3::bigint[], $4::timestamptz[])
                      with ordinality as d (log_shard, log_id, log_at, ordinal)
                 order by d.ordinal";
    sqlx::query(query)
        .bind(tenant)
        .bind(events.iter().map(|event| event.shard).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.id).collect::<Vec<_>>())
        .bind(events.iter().map(|event| event.at).collect::<Vec<_>>())
        .bind(accepted_at)
        .execute(tx)
        .await
        .map(drop)
}

/// Which of these events, by their ids in the log, are deferred and not checked yet.
pub(crate) async fn unchecked_among(db: &mut PgConnection, tenant: &str, log_ids: &[i64]) -> sqlx::Result<Vec<i64>> {
    if log_ids.is_empty() {
        return Ok(Vec::new());
    }
    let query = "select log_id from pillarbox_hub.deferred_event
                 where tenant = $1 and not is_checked and log_id = any ($2)";
    sqlx::query_scalar(query).bind(tenant).bind(log_ids).fetch_all(db).await
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
    let query = "select id, log_shard, log_id, log_at, matches, after, is_checked, accepted_at from pillarbox_hub.deferred_event
                 where tenant = $1 and id > $2 order by id limit $3";
    sqlx::query_as(query).bind(tenant).bind(above).bind(limit as i64).fetch_all(tx).await
}

/// Deletes processed events of a tenant, and saves how far the event after them, which is checked, has come. They are given one by
/// one: the retry of a rejected event may commit an id that is lower than theirs.
pub(crate) async fn advance(
    tx: &mut PgConnection,
    tenant: &str,
    processed: &[i64],
    partial: Option<(i64, Uuid)>,
) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.deferred_event where tenant = $1 and id = any ($2)";
    sqlx::query(query).bind(tenant).bind(processed).execute(&mut *tx).await?;
    if let Some((id, after)) = partial {
        let query =
            "update pillarbox_hub.deferred_event set after = $3, is_checked = true where tenant = $1 and id = $2";
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
