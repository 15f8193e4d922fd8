use chrono::{DateTime, Utc};
use contracts::events::EventVersion;
use contracts::joins::{JoinsCounted, Wanted};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::event::status;
use crate::reconcile::{Asked, Progress};

/// Who starts runs by time takes turns. False: another one is at it.
pub(crate) async fn take_turn(tx: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar("select pg_try_advisory_xact_lock(hashtextextended('pillarbox_events.reconciliation', 0))")
        .fetch_one(tx)
        .await
}

/// Whether one that repairs has stated everything since then, or is at it: it began after `alive_since`.
pub(crate) async fn has_run_since(
    db: &mut PgConnection,
    since: DateTime<Utc>,
    alive_since: DateTime<Utc>,
) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (select from pillarbox_events.reconciliation
                        where started_at > $1 and not dry_run and (parts is not null or started_at > $2))",
    )
    .bind(since)
    .bind(alive_since)
    .fetch_one(db)
    .await
}

pub(crate) async fn begin(db: &mut PgConnection, run: Uuid, asked: Asked, now: DateTime<Utc>) -> sqlx::Result<()> {
    let insert =
        "insert into pillarbox_events.reconciliation (run, started_at, dry_run, force) values ($1, $2, $3, $4)";
    sqlx::query(insert).bind(run).bind(now).bind(asked.dry_run).bind(asked.force).execute(db).await.map(drop)
}

/// By id, behind `after`: all but what nobody ever saw, and what is long over.
pub(crate) async fn to_state(
    db: &mut PgConnection,
    after: Option<Uuid>,
    ended_after: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<EventVersion>> {
    let rows = sqlx::query(
        "select id, version, status, count_version, active_participants from pillarbox_events.event
         where id > $1 and end_time > $2
           and (status = 'published' or published_at is not null or count_version > 0)
         order by id limit $3",
    )
    .bind(after.unwrap_or(Uuid::nil()))
    .bind(ended_after)
    .bind(limit)
    .fetch_all(db)
    .await?;
    let stated = |row: &PgRow| {
        Ok(EventVersion {
            event_id: row.try_get("id")?,
            version: row.try_get("version")?,
            status: status(row, "status")?.into(),
            count_version: row.try_get("count_version")?,
            active_participants: row.try_get("active_participants")?,
        })
    };
    rows.iter().map(stated).collect()
}

/// All of its parts are posted. With none there is nothing to wait for.
pub(crate) async fn posted(db: &mut PgConnection, run: Uuid, parts: i32, now: DateTime<Utc>) -> sqlx::Result<()> {
    sqlx::query(
        "update pillarbox_events.reconciliation
         set parts = $2, finished_at = case when cardinality(answered) >= $2 then $3 end where run = $1",
    )
    .bind(run)
    .bind(parts)
    .bind(now)
    .execute(db)
    .await
    .map(drop)
}

/// How many of these are not known elsewhere as they are: by an old version although they have not changed since then, or by
/// one that was never given here, or not any more.
pub(crate) async fn count_unheard(
    db: &mut PgConnection,
    wanted: &[Wanted],
    unchanged_since: DateTime<Utc>,
) -> sqlx::Result<i64> {
    let (ids, versions) = columns(wanted);
    sqlx::query_scalar(
        "select count(*) from unnest($1::uuid[], $2::bigint[]) as wanted (id, version)
         join pillarbox_events.event on event.id = wanted.id
         where event.version < wanted.version or (event.version > wanted.version and event.updated_at <= $3)",
    )
    .bind(ids)
    .bind(versions)
    .bind(unchanged_since)
    .fetch_one(db)
    .await
}

/// Gives those a new version that are known by one above their own; `all`: every one of them. Returns which.
pub(crate) async fn lift(db: &mut PgConnection, wanted: &[Wanted], all: bool) -> sqlx::Result<Vec<Uuid>> {
    let (ids, versions) = columns(wanted);
    // In the order of their ids, whoever locks several.
    sqlx::query_scalar(
        "with locked as (
             select event.id, greatest(event.version, wanted.version) + 1 as version
             from unnest($1::uuid[], $2::bigint[]) as wanted (id, version)
             join pillarbox_events.event on event.id = wanted.id
             where event.version < wanted.version or $3
             order by event.id for update of event
         )
         update pillarbox_events.event set version = locked.version from locked where event.id = locked.id
         returning event.id",
    )
    .bind(ids)
    .bind(versions)
    .bind(all)
    .fetch_all(db)
    .await
}

fn columns(wanted: &[Wanted]) -> (Vec<Uuid>, Vec<i64>) {
    wanted.iter().map(|wanted| (wanted.event_id, wanted.version)).unzip()
}

/// Enters the answer to a part, once. False: that part was answered, or nobody knows the run.
pub(crate) async fn answered(
    db: &mut PgConnection,
    counted: &JoinsCounted,
    unheard: i64,
    now: DateTime<Utc>,
) -> sqlx::Result<bool> {
    let repaired = |drifted: i32| if counted.dry_run { 0 } else { drifted };
    let done = sqlx::query(
        "update pillarbox_events.reconciliation
         set answered = answered || $2, checked = checked + $3, drifted = drifted + $4, repaired = repaired + $5,
             joins_drifted = joins_drifted + $6, joins_repaired = joins_repaired + $7,
             finished_at = case when cardinality(answered) + 1 >= parts then $8 end
         where run = $1 and not answered @> array[$2]",
    )
    .bind(counted.run)
    .bind(counted.part)
    .bind(counted.checked)
    .bind(counted.events.len() as i32)
    .bind(repaired(counted.events.len() as i32))
    .bind(counted.drifted + unheard as i32)
    .bind(counted.repaired + repaired(unheard as i32))
    .bind(now)
    .execute(db)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub(crate) async fn progress(db: &mut PgConnection, run: Uuid) -> sqlx::Result<Option<Progress>> {
    let row = sqlx::query(
        "select parts, cardinality(answered) as answered, checked, drifted, repaired, joins_drifted, joins_repaired,
                finished_at
         from pillarbox_events.reconciliation where run = $1",
    )
    .bind(run)
    .fetch_optional(db)
    .await?;
    let progress = |row: PgRow| {
        Ok(Progress {
            parts: row.try_get("parts")?,
            answered: row.try_get("answered")?,
            checked: row.try_get("checked")?,
            drifted: row.try_get("drifted")?,
            repaired: row.try_get("repaired")?,
            joins_drifted: row.try_get("joins_drifted")?,
            joins_repaired: row.try_get("joins_repaired")?,
            finished_at: row.try_get("finished_at")?,
        })
    };
    row.map(progress).transpose()
}

/// Runs of long ago.
pub(crate) async fn forget(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_events.reconciliation where started_at < $1";
    sqlx::query(query).bind(before).execute(db).await.map(drop)
}
