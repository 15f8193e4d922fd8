use chrono::{DateTime, Utc};
use contracts::joins::JoinsCounted;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::event::{COLUMNS, event};
use crate::domain::Event;
use crate::reconcile::{Asked, Progress};

/// Who starts runs by time takes turns. False: another one is at it.
pub(crate) async fn take_turn(tx: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar("select pg_try_advisory_xact_lock(hashtextextended('pillarbox_events.reconciliation', 0))")
        .fetch_one(tx)
        .await
}

pub(crate) async fn has_begun_since(db: &mut PgConnection, since: DateTime<Utc>) -> sqlx::Result<bool> {
    sqlx::query_scalar("select exists (select from pillarbox_events.reconciliation where started_at > $1)")
        .bind(since)
        .fetch_one(db)
        .await
}

pub(crate) async fn begin(db: &mut PgConnection, run: Uuid, asked: Asked, now: DateTime<Utc>) -> sqlx::Result<()> {
    let insert =
        "insert into pillarbox_events.reconciliation (run, started_at, dry_run, force) values ($1, $2, $3, $4)";
    sqlx::query(insert).bind(run).bind(now).bind(asked.dry_run).bind(asked.force).execute(db).await.map(drop)
}

/// Events whose counts matter, by id, behind `after`.
pub(crate) async fn to_state(
    db: &mut PgConnection,
    after: Option<Uuid>,
    ended_after: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<Event>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_events.event
         where id > $1 and (status = 'published' or active_participants <> 0) and end_time > $2
         order by id limit $3"
    );
    let rows = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(after.unwrap_or(Uuid::nil()))
        .bind(ended_after)
        .bind(limit)
        .fetch_all(db)
        .await?;
    rows.iter().map(event).collect()
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

/// Counts here that are not what the joins service counted, unless they are newer than that.
pub(crate) async fn drifted(db: &mut PgConnection, counted: &JoinsCounted) -> sqlx::Result<Vec<Uuid>> {
    sqlx::query_scalar(
        "select event.id
         from unnest($1::uuid[], $2::integer[], $3::bigint[]) as counted (id, active, version)
         join pillarbox_events.event on event.id = counted.id
         where event.active_participants <> counted.active and (event.count_version <= counted.version or $4)",
    )
    .bind(counted.events.iter().map(|event| event.event_id).collect::<Vec<_>>())
    .bind(counted.events.iter().map(|event| event.counts.active).collect::<Vec<_>>())
    .bind(counted.events.iter().map(|event| event.counts.version).collect::<Vec<_>>())
    .bind(counted.force)
    .fetch_all(db)
    .await
}

/// Takes over what was counted, unless it is older than what is here; forced, in any case. Returns how many counts changed.
pub(crate) async fn repair(db: &mut PgConnection, counted: &JoinsCounted) -> sqlx::Result<i64> {
    let mut events = counted.events.clone();
    // In one order, whoever repairs.
    events.sort_by_key(|event| event.event_id);
    sqlx::query_scalar(
        "with counted as (
             select * from unnest($1::uuid[], $2::integer[], $3::bigint[]) as counted (id, active, version)
         ), locked as (
             select event.id, event.active_participants, counted.active, counted.version
             from counted join pillarbox_events.event on event.id = counted.id
             where (event.active_participants <> counted.active or event.count_version <> counted.version)
               and (event.count_version <= counted.version or $4)
             order by event.id for update of event
         ), repaired as (
             update pillarbox_events.event set active_participants = locked.active, count_version = locked.version
             from locked where event.id = locked.id
             returning locked.active_participants <> locked.active as changed
         )
         select count(*) filter (where changed) from repaired",
    )
    .bind(events.iter().map(|event| event.event_id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.counts.active).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.counts.version).collect::<Vec<_>>())
    .bind(counted.force)
    .fetch_one(db)
    .await
}

/// Enters the answer to a part, once. False: that part was answered, or nobody knows the run.
pub(crate) async fn answered(
    db: &mut PgConnection,
    counted: &JoinsCounted,
    (drifted, repaired): (i64, i64),
    now: DateTime<Utc>,
) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "update pillarbox_events.reconciliation
         set answered = answered || $2, checked = checked + $3, drifted = drifted + $4, repaired = repaired + $5,
             joins_drifted = joins_drifted + $6, joins_repaired = joins_repaired + $7,
             finished_at = case when cardinality(answered) + 1 >= parts then $8 end
         where run = $1 and not answered @> array[$2]",
    )
    .bind(counted.run)
    .bind(counted.part)
    .bind(counted.events.len() as i32)
    .bind(drifted as i32)
    .bind(repaired as i32)
    .bind(counted.drifted)
    .bind(counted.repaired)
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
