//! Counts in PostgreSQL. The row of a project is the lock of its items, so that concurrent batches cannot deadlock.

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::counts::{Changed, Counts, Limits, Reading, Replaced};
use crate::domain::{Items, RATE_SECONDS, Snapshot, Target};

/// Initialises the counts, unless they are initialised with this token already.
pub(crate) async fn initialise(
    db: &mut PgConnection,
    project_id: &str,
    token: Uuid,
    expires_at: DateTime<Utc>,
) -> sqlx::Result<()> {
    let query = "with initialised as (
                     insert into pillarbox_progress.state as old
                         (project_id, token, status, total, done, errors, expires_at)
                     values ($1, $2, $4, 0, 0, 0, $3)
                     on conflict (project_id) do update set token = excluded.token, status = excluded.status, total = 0, done = 0,
                         errors = 0, expires_at = excluded.expires_at, rate = null, rate_at = null, rate_since = null,
                         ended_at = null
                     where old.token <> excluded.token returning project_id
                 )
                 delete from pillarbox_progress.item where project_id in (select project_id from initialised)";
    let status = Snapshot::INITIAL.status.as_str();
    sqlx::query(query).bind(project_id).bind(token).bind(expires_at).bind(status).execute(db).await.map(drop)
}

/// Counts the items that were not counted before, and completes the project if it is at the finish line. Returns None if there
/// are no counts with this token, or there could be too many items.
pub(crate) async fn mark(
    db: &mut PgConnection,
    counts: &Counts,
    items: &Items,
    now: DateTime<Utc>,
    limits: Limits,
) -> sqlx::Result<Option<Changed>> {
    let query = "with locked as materialized (
                     select status, total, done from pillarbox_progress.state
                     where project_id = $1 and token = $2 and (status in ('DONE', 'FAILED')
                         or (expires_at > $5 and done <= $8 - cardinality($3::text[]) - cardinality($4::text[]))) for update
                 ), succeeded as (
                     insert into pillarbox_progress.item (project_id, item_id)
                     select $1, id from unnest($3::text[]) as id
                     where exists (select from locked where status not in ('DONE', 'FAILED'))
                     on conflict do nothing returning 1
                 ), failed as (
                     insert into pillarbox_progress.item (project_id, item_id)
                     select $1, id from unnest($4::text[]) as id
                     where exists (select from locked where status not in ('DONE', 'FAILED'))
                     on conflict do nothing returning 1
                 ), counted as (
                     select (select count(*) from succeeded) + (select count(*) from failed) as items,
                         (select count(*) from failed) as errors
                 ), result as (
                     select c.*, case when l.total > 0 and l.done + c.items >= l.total
                         and l.status not in ('CRAWLING', 'DONE', 'FAILED') then 'DONE' else l.status end as status
                     from counted as c, locked as l
                 )
                 update pillarbox_progress.state as s set
                     done = s.done + r.items,
                     errors = s.errors + r.errors,
                     status = r.status,
                     ended_at = case when r.status in ('DONE', 'FAILED') then coalesce(s.ended_at, $5) end,
                     expires_at = case when r.status in ('DONE', 'FAILED') and s.ended_at is null
                         then greatest(s.expires_at, $5 + $7) else s.expires_at end,
                     rate = case when r.items = 0 then s.rate else
                         coalesce(s.rate * exp(-least(greatest(extract(epoch from $5 - s.rate_at)::float8, 0), 3000) / $6), 0)
                             + r.items / $6 end,
                     rate_at = case when r.items = 0 then s.rate_at else $5 end,
                     rate_since = case when r.items = 0 then s.rate_since else coalesce(s.rate_since, $5) end
                 from result as r
                 where s.project_id = $1
                 returning s.status, s.total, s.done, s.errors, s.ended_at, r.items as counted";
    sqlx::query_as(query)
        .bind(&counts.project_id)
        .bind(counts.token)
        .bind(&items.succeeded)
        .bind(&items.failed)
        .bind(now)
        .bind(RATE_SECONDS)
        .bind(limits.keep)
        .bind(limits.items_max)
        .fetch_optional(db)
        .await
}

/// How many items would be counted in all after these were marked; None if there are no counts with this token.
pub(crate) async fn count_with(db: &mut PgConnection, counts: &Counts, items: &Items) -> sqlx::Result<Option<i64>> {
    let query = "select s.done + (select count(distinct id) from unnest($3::text[] || $4::text[]) as id
                     where not exists (select from pillarbox_progress.item where project_id = $1 and item_id = id))
                 from pillarbox_progress.state as s where s.project_id = $1 and s.token = $2";
    let counting = sqlx::query_scalar(query).bind(&counts.project_id).bind(counts.token);
    counting.bind(&items.succeeded).bind(&items.failed).fetch_optional(db).await
}

/// Sets the status and the total if they are those of `from`, and completes the project if it is at the finish line. `keep`: how
/// long counts stay that become final.
pub(crate) async fn replace(
    db: &mut PgConnection,
    counts: &Counts,
    from: &Snapshot,
    to: Target,
    now: DateTime<Utc>,
    keep: TimeDelta,
) -> sqlx::Result<Replaced> {
    let query = "with locked as materialized (
                     select project_id, case when $6 > 0 and done >= $6 and $5 not in ('CRAWLING', 'DONE', 'FAILED')
                         then 'DONE' else $5 end as status
                     from pillarbox_progress.state
                     where project_id = $1 and token = $2 and status = $3 and total = $4
                         and (expires_at > $7 or status in ('DONE', 'FAILED')) for update
                 )
                 update pillarbox_progress.state as s set status = l.status, total = $6,
                     ended_at = case when l.status in ('DONE', 'FAILED') then coalesce(s.ended_at, $7) end,
                     expires_at = case when l.status in ('DONE', 'FAILED') then greatest(s.expires_at, $7 + $8)
                         else s.expires_at end
                 from locked as l where s.project_id = l.project_id
                 returning s.status, s.total, s.done, s.errors, s.ended_at, 0::bigint as counted";
    let replacing = sqlx::query_as(query)
        .bind(&counts.project_id)
        .bind(counts.token)
        .bind(from.status.as_str())
        .bind(from.total)
        .bind(to.status.as_str())
        .bind(to.total)
        .bind(now)
        .bind(keep);
    if let Some(changed) = replacing.fetch_optional(&mut *db).await? {
        return Ok(Replaced::Changed(changed));
    }
    let exists = "select exists (select from pillarbox_progress.state where project_id = $1 and token = $2
                                     and (expires_at > $3 or status in ('DONE', 'FAILED')))";
    let exists: bool =
        sqlx::query_scalar(exists).bind(&counts.project_id).bind(counts.token).bind(now).fetch_one(db).await?;
    Ok(if exists { Replaced::Conflict } else { Replaced::Lost })
}

/// Completes the projects that are at the finish line, and records when the others have ended that another program has ended.
pub(crate) async fn complete(
    db: &mut PgConnection,
    many: &[Counts],
    now: DateTime<Utc>,
    keep: TimeDelta,
) -> sqlx::Result<()> {
    let ids: Vec<&str> = many.iter().map(|counts| counts.project_id.as_str()).collect();
    let query = "update pillarbox_progress.state
                 set status = case when status = 'FAILED' then 'FAILED' else 'DONE' end, ended_at = $2,
                     expires_at = greatest(expires_at, $2 + $3)
                 where project_id = any($1) and ended_at is null and (status in ('DONE', 'FAILED')
                     or (total > 0 and done >= total and status <> 'CRAWLING' and expires_at > $2))";
    sqlx::query(query).bind(ids).bind(now).bind(keep).execute(db).await.map(drop)
}

/// Reads many counts, in order; None where there are none with the token. Final ones do not expire.
pub(crate) async fn read(
    db: &mut PgConnection,
    many: &[Counts],
    now: DateTime<Utc>,
) -> sqlx::Result<Vec<Option<Reading>>> {
    let ids: Vec<&str> = many.iter().map(|counts| counts.project_id.as_str()).collect();
    let query = "select project_id, token, status, total, done, errors, ended_at, rate, rate_at, rate_since
                 from pillarbox_progress.state
                 where project_id = any($1) and (expires_at > $2 or status in ('DONE', 'FAILED'))";
    let rows: Vec<ReadingRow> = sqlx::query_as(query).bind(ids).bind(now).fetch_all(db).await?;
    let mut found: HashMap<_, _> = rows.into_iter().map(|row| ((row.project_id, row.token), row.reading)).collect();
    Ok(many.iter().map(|counts| found.remove(&(counts.project_id.clone(), counts.token))).collect())
}

#[derive(sqlx::FromRow)]
struct ReadingRow {
    project_id: String,
    token: Uuid,
    #[sqlx(flatten)]
    reading: Reading,
}

/// Some projects whose counts are no longer needed: they are archived, or have expired. Final counts that are not archived are
/// needed, however old they are.
pub(crate) async fn unneeded(db: &mut PgConnection, now: DateTime<Utc>, limit: i64) -> sqlx::Result<Vec<String>> {
    let query = "select s.project_id from pillarbox_progress.state as s
                 join pillarbox_progress.project as p on p.id = s.project_id
                 where p.finished_at is not null or (s.expires_at < $1 and s.status not in ('DONE', 'FAILED')) limit $2";
    sqlx::query_scalar(query).bind(now).bind(limit).fetch_all(db).await
}

/// Deletes up to `limit` items of a project, if its counts are not needed. Returns how many. The lock excludes that the project
/// is initialised again at the same time, and loses the items that are counted then.
pub(crate) async fn delete_items(
    db: &mut PgConnection,
    project_id: &str,
    now: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<u64> {
    let query = "with unneeded as materialized (
                     select s.project_id from pillarbox_progress.state as s
                     join pillarbox_progress.project as p on p.id = s.project_id
                     where s.project_id = $1 and (p.finished_at is not null
                         or (s.expires_at < $2 and s.status not in ('DONE', 'FAILED'))) for update of s
                 )
                 delete from pillarbox_progress.item where project_id in (select project_id from unneeded) and item_id in
                     (select item_id from pillarbox_progress.item where project_id = $1 limit $3)";
    Ok(sqlx::query(query).bind(project_id).bind(now).bind(limit).execute(db).await?.rows_affected())
}

/// Deletes the counts of a project that is archived, or whose counts have expired.
pub(crate) async fn delete(db: &mut PgConnection, project_id: &str, now: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_progress.state as s using pillarbox_progress.project as p
                 where s.project_id = $1 and p.id = s.project_id and (p.finished_at is not null
                     or (s.expires_at < $2 and s.status not in ('DONE', 'FAILED')))";
    sqlx::query(query).bind(project_id).bind(now).execute(db).await.map(drop)
}
