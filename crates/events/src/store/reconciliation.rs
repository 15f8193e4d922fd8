//! Reconciliation runs, and the reads and writes of events that belong to them.

use chrono::{DateTime, Utc};
use contracts::events::EventVersion;
use contracts::joins::{JoinsCounted, RestateRequest};
use pillarbox::database::try_work_lock;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::{Progress, ReconcileOptions, Status};

/// Acquires the lock for starting periodic runs. Returns false if another process holds it.
pub(crate) async fn try_lock(tx: &mut PgConnection) -> sqlx::Result<bool> {
    try_work_lock(tx, "events.reconciliation").await
}

/// Whether a repairing run has started after `since` and has posted all parts, or is still posting them: it started
/// after `alive_since`.
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

pub(crate) async fn begin(
    db: &mut PgConnection,
    run: Uuid,
    options: ReconcileOptions,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let insert =
        "insert into pillarbox_events.reconciliation (run, started_at, dry_run, force) values ($1, $2, $3, $4)";
    sqlx::query(insert).bind(run).bind(now).bind(options.dry_run).bind(options.force).execute(db).await.map(drop)
}

/// The versions of the events after `after`, by id. Excludes events that were never visible or ended before
/// `ended_after`.
pub(crate) async fn list_versions(
    db: &mut PgConnection,
    after: Option<Uuid>,
    ended_after: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<EventVersion>> {
    let rows: Vec<VersionRow> = sqlx::query_as(
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
    Ok(rows.into_iter().map(EventVersion::from).collect())
}

#[derive(sqlx::FromRow)]
struct VersionRow {
    id: Uuid,
    version: i64,
    #[sqlx(try_from = "&'a str")]
    status: Status,
    count_version: i64,
    active_participants: i32,
}

impl From<VersionRow> for EventVersion {
    fn from(row: VersionRow) -> EventVersion {
        let VersionRow { id, version, status, count_version, active_participants } = row;
        EventVersion { event_id: id, version, status: status.into(), count_version, active_participants }
    }
}

/// Records that all parts are posted. The run is finished if all of them have their reply, or if there are none.
pub(crate) async fn set_parts(db: &mut PgConnection, run: Uuid, parts: i32, now: DateTime<Utc>) -> sqlx::Result<()> {
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

/// The number of these events that the joins service has in a wrong version: a lower one, although the event has not
/// changed since `unchanged_since`, or one above the current version.
pub(crate) async fn count_outdated(
    db: &mut PgConnection,
    requests: &[RestateRequest],
    unchanged_since: DateTime<Utc>,
) -> sqlx::Result<i64> {
    let (ids, versions) = columns(requests);
    sqlx::query_scalar(
        "select count(*) from unnest($1::uuid[], $2::bigint[]) as request (id, version)
         join pillarbox_events.event on event.id = request.id
         where event.version < request.version or (event.version > request.version and event.updated_at <= $3)",
    )
    .bind(ids)
    .bind(versions)
    .bind(unchanged_since)
    .fetch_one(db)
    .await
}

/// Raises the version of each event that the joins service has in a higher version; of every event if `all` is set.
/// Returns the ids of the raised events.
pub(crate) async fn raise_versions(
    db: &mut PgConnection,
    requests: &[RestateRequest],
    all: bool,
) -> sqlx::Result<Vec<Uuid>> {
    let (ids, versions) = columns(requests);
    // Every transaction locks events in the order of their ids, which prevents deadlocks.
    sqlx::query_scalar(
        "with locked as (
             select event.id, greatest(event.version, request.version) + 1 as version
             from unnest($1::uuid[], $2::bigint[]) as request (id, version)
             join pillarbox_events.event on event.id = request.id
             where event.version < request.version or $3
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

fn columns(requests: &[RestateRequest]) -> (Vec<Uuid>, Vec<i64>) {
    requests.iter().map(|request| (request.event_id, request.version)).unzip()
}

/// Records the reply to a part. Returns false if the part already has a reply or the run does not exist.
pub(crate) async fn record_reply(
    db: &mut PgConnection,
    counted: &JoinsCounted,
    outdated: i64,
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
    .bind(counted.drifted + outdated as i32)
    .bind(counted.repaired + repaired(outdated as i32))
    .bind(now)
    .execute(db)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub(crate) async fn progress(db: &mut PgConnection, run: Uuid) -> sqlx::Result<Option<Progress>> {
    sqlx::query_as(
        "select parts, cardinality(answered) as answered, checked, drifted, repaired, joins_drifted, joins_repaired,
                finished_at
         from pillarbox_events.reconciliation where run = $1",
    )
    .bind(run)
    .fetch_optional(db)
    .await
}

/// Deletes the runs that started before this time.
pub(crate) async fn delete_runs(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_events.reconciliation where started_at < $1";
    sqlx::query(query).bind(before).execute(db).await.map(drop)
}
