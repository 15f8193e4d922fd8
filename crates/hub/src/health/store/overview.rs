//! SQL of the overview: totals of the installation, and the subscribers that need an operator. No query reads more rows when
//! there are more messages, attempts or healthy subscribers.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::health::counts::RANGES;
use crate::health::totals::TotalCounts;

/// A subscriber that needs an operator.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct SubscriberWithIssue {
    pub(crate) id: Uuid,
    pub(crate) tenant: String,
    pub(crate) name: String,
    /// Why it was switched off; None if its attempts fail.
    pub(crate) inactive_reason: Option<String>,
    /// Since when its attempts fail; None if it was switched off.
    pub(crate) failing_since: Option<DateTime<Utc>>,
}

/// Adds attempts to the totals, and their times to those of the current minute.
pub(crate) async fn add_attempts(db: &mut PgConnection, slot: i16, counts: &TotalCounts) -> sqlx::Result<()> {
    let TotalCounts { attempts, end_to_end } = counts;
    sqlx::query(
        "with total as (
             insert into pillarbox_hub.attempt_total as old (slot, delivered, failed, dead) values ($1, $2, $3, $4)
             on conflict (slot) do update
             set delivered = old.delivered + excluded.delivered, failed = old.failed + excluded.failed,
                 dead = old.dead + excluded.dead
         )
         insert into pillarbox_hub.attempt_minute as old (at, slot, latency, end_to_end)
         values (date_trunc('minute', now(), 'UTC'), $1, $5, $6)
         on conflict (at, slot) do update
         set latency = array(select coalesce(one, 0) + coalesce(other, 0)
                             from unnest(old.latency, excluded.latency) with ordinality as both_of (one, other, n) order by n),
             end_to_end = array(select coalesce(one, 0) + coalesce(other, 0)
                                from unnest(old.end_to_end, excluded.end_to_end) with ordinality as both_of (one, other, n)
                                order by n)",
    )
    .bind(slot)
    .bind(attempts.delivered)
    .bind(attempts.failed)
    .bind(attempts.dead)
    .bind(attempts.latency.as_slice())
    .bind(end_to_end.as_slice())
    .execute(db)
    .await
    .map(drop)
}

/// Deletes the times of minutes before this one.
pub(crate) async fn delete_minutes(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_hub.attempt_minute where at < $1").bind(before).execute(db).await.map(drop)
}

/// All attempts, with the times of the last minutes only.
pub(crate) async fn attempts(db: &mut PgConnection, minutes: i32) -> sqlx::Result<TotalCounts> {
    let sums = |times: &str| {
        let sums: Vec<String> = (1..=RANGES).map(|at| format!("coalesce(sum({times}[{at}]), 0)")).collect();
        format!("array[{}]::bigint[] as {times}", sums.join(", "))
    };
    let query = format!(
        "with total as (
             select coalesce(sum(delivered), 0)::bigint as delivered, coalesce(sum(failed), 0)::bigint as failed,
                    coalesce(sum(dead), 0)::bigint as dead
             from pillarbox_hub.attempt_total
         ), minute as (
             select {}, {} from pillarbox_hub.attempt_minute where at >= now() - make_interval(mins => $1)
         )
         select * from total, minute",
        sums("latency"),
        sums("end_to_end")
    );
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(minutes).fetch_one(db).await
}

/// The number of dead letters that were not retried, by tenant, counted up to `max` in all. Most first.
pub(crate) async fn count_dead_letters(db: &mut PgConnection, max: i64) -> sqlx::Result<Vec<(String, i64)>> {
    let query = "select tenant, count(*)
                 from (select tenant from pillarbox_hub.dead_letter where manual_retry_at is null limit $1) as counted
                 group by tenant order by count(*) desc, tenant";
    sqlx::query_as(query).bind(max).fetch_all(db).await
}

/// Subscribers that the hub has switched off, and those whose attempts fail since before `failing_before`: at most `limit` of
/// each kind. A subscriber that its owner has paused or switched off is not among them.
pub(crate) async fn subscribers_with_issues(
    db: &mut PgConnection,
    failing_before: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<SubscriberWithIssue>> {
    sqlx::query_as(
        "(select id, tenant, name, inactive_reason, null::timestamptz as failing_since from pillarbox_hub.subscriber
          where not is_active and inactive_reason is not null order by id limit $2)
         union all
         (select subscriber.id, tenant, name, null, state.failing_since
          from pillarbox_hub.subscriber_state as state join pillarbox_hub.subscriber on subscriber.id = state.subscriber
          where state.failing_since < $1 and is_active and paused_at is null
          order by state.failing_since limit $2)",
    )
    .bind(failing_before)
    .bind(limit)
    .fetch_all(db)
    .await
}
