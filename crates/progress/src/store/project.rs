//! Projects, and which of them have completed.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

use crate::domain::{Project, Snapshot, Status};

/// The owner of a project that is to be deleted. No caller has it.
const NO_OWNER: &str = "deleted";
const COLUMNS: &str = "id, tenant, owner, token, run, created_at, expires_at, finished_at, status, total, done, errors";

/// Inserts a project. Returns false if there is one with this id.
pub(crate) async fn insert(db: &mut PgConnection, new: &Project) -> sqlx::Result<bool> {
    let query = "insert into pillarbox_progress.project (id, tenant, owner, token, created_at, expires_at)
                 values ($1, $2, $3, $4, $5, $6) on conflict do nothing";
    let done = sqlx::query(query)
        .bind(&new.id)
        .bind(new.tenant.as_str())
        .bind(&new.owner)
        .bind(new.token)
        .bind(new.created_at)
        .bind(new.expires_at)
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

pub(crate) async fn find(db: &mut PgConnection, id: &str) -> sqlx::Result<Option<Project>> {
    let query = format!("select {COLUMNS} from pillarbox_progress.project where id = $1");
    let row = sqlx::query(AssertSqlSafe(query)).bind(id).fetch_optional(db).await?;
    row.as_ref().map(project_of).transpose()
}

/// Loads a project and locks its row.
pub(crate) async fn lock(db: &mut PgConnection, id: &str) -> sqlx::Result<Option<Project>> {
    let query = format!("select {COLUMNS} from pillarbox_progress.project where id = $1 for update");
    let row = sqlx::query(AssertSqlSafe(query)).bind(id).fetch_optional(db).await?;
    row.as_ref().map(project_of).transpose()
}

/// The number of unfinished projects of an owner that have not expired. It counts up to `limit`.
pub(crate) async fn count_unfinished(
    db: &mut PgConnection,
    owner: &str,
    now: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<i64> {
    let query = "select count(*) from (select from pillarbox_progress.project
                     where owner = $1 and finished_at is null and expires_at > $2 limit $3) as unfinished";
    sqlx::query_scalar(query).bind(owner).bind(now).bind(limit).fetch_one(db).await
}

/// The projects of an owner, or of all owners, newest first.
pub(crate) async fn list(
    db: &mut PgConnection,
    owner: Option<&str>,
    (before, limit): (Option<(DateTime<Utc>, String)>, u32),
) -> sqlx::Result<Vec<Project>> {
    let of_owner = if owner.is_some() { "owner = $1" } else { "$1::text is null" };
    let after_page =
        if before.is_some() { "(created_at, id) < ($2, $3)" } else { "$2::timestamptz is null and $3::text is null" };
    let query = format!(
        "select {COLUMNS} from pillarbox_progress.project where {of_owner} and {after_page}
         order by created_at desc, id desc limit $4"
    );
    let (at, id) = before.unzip();
    let listing = sqlx::query(AssertSqlSafe(query)).bind(owner).bind(at).bind(id).bind(i64::from(limit));
    listing.fetch_all(db).await?.iter().map(project_of).collect()
}

/// Unfinished projects with counts, in the order of their ids: those that have not expired before this time, and those whose final
/// counts are in PostgreSQL.
pub(crate) async fn unfinished(
    db: &mut PgConnection,
    (after, limit): (&str, i64),
    expired_before: DateTime<Utc>,
) -> sqlx::Result<Vec<Project>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_progress.project as p
         where finished_at is null and id > $1 and run is not null and (expires_at > $3 or exists (
             select from pillarbox_progress.state as s where s.project_id = p.id and s.status in ('DONE', 'FAILED')))
         order by id limit $2"
    );
    let rows = sqlx::query(AssertSqlSafe(query)).bind(after).bind(limit).bind(expired_before).fetch_all(db).await?;
    rows.iter().map(project_of).collect()
}

/// Records on which server the counts were initialised. Returns false if that is recorded, or the token has changed.
pub(crate) async fn set_run(db: &mut PgConnection, id: &str, token: Uuid, run: &str) -> sqlx::Result<bool> {
    let query = "update pillarbox_progress.project set run = $3 where id = $1 and token = $2 and run is null";
    let done = sqlx::query(query).bind(id).bind(token).bind(run).execute(db).await?;
    Ok(done.rows_affected() > 0)
}

/// Gives an unfinished project a new token, under which nothing is initialised. Returns false if it has finished, or has another
/// token than `old` by now.
pub(crate) async fn replace_token(
    db: &mut PgConnection,
    (id, old): (&str, Uuid),
    new: Uuid,
    expires_at: DateTime<Utc>,
) -> sqlx::Result<bool> {
    let query = "update pillarbox_progress.project set token = $3, run = null, expires_at = $4
                 where id = $1 and token = $2 and finished_at is null";
    let done = sqlx::query(query).bind(id).bind(old).bind(new).bind(expires_at).execute(db).await?;
    Ok(done.rows_affected() > 0)
}

/// Archives the final state. Returns false if the project has finished before, or the counts are those of another token.
pub(crate) async fn finish(
    db: &mut PgConnection,
    (id, token): (&str, Uuid),
    snapshot: &Snapshot,
    now: DateTime<Utc>,
) -> sqlx::Result<bool> {
    let query = "update pillarbox_progress.project
                 set finished_at = $3, status = $4, total = $5, done = $6, errors = $7
                 where id = $1 and token = $2 and finished_at is null";
    let done = sqlx::query(query)
        .bind(id)
        .bind(token)
        .bind(now)
        .bind(snapshot.status.as_str())
        .bind(snapshot.total)
        .bind(snapshot.done)
        .bind(snapshot.errors)
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// Records that a project has completed. Returns false if that is recorded.
pub(crate) async fn insert_completed(db: &mut PgConnection, id: &str, now: DateTime<Utc>) -> sqlx::Result<bool> {
    let query =
        "insert into pillarbox_progress.completed (project_id, completed_at) values ($1, $2) on conflict do nothing";
    let done = sqlx::query(query).bind(id).bind(now).execute(db).await?;
    Ok(done.rows_affected() > 0)
}

/// Deletes up to `limit` projects that have finished, or expired unfinished, before this time. Those with counts in PostgreSQL
/// are deleted after their counts. The age is compared again when a row is locked: a project may have been started again meanwhile.
pub(crate) async fn delete_old(db: &mut PgConnection, before: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_progress.project where id in (
                     select id from (
                         (select id from pillarbox_progress.project where finished_at < $1 order by finished_at limit $2)
                         union all
                         (select id from pillarbox_progress.project where finished_at is null and expires_at < $1
                          order by expires_at limit $2)
                     ) as old
                     where not exists (select from pillarbox_progress.state where project_id = old.id) limit $2)
                 and (finished_at < $1 or (finished_at is null and expires_at < $1))";
    Ok(sqlx::query(query).bind(before).bind(limit).execute(db).await?.rows_affected())
}

/// Takes up to `limit` projects from their owner and ends them, so that [`ownerless`] finds them. Returns their ids.
pub(crate) async fn disown(db: &mut PgConnection, owner: &str, limit: i64) -> sqlx::Result<Vec<String>> {
    let query = "update pillarbox_progress.project
                 set owner = $3, finished_at = statement_timestamp(), status = coalesce(status, 'FAILED'),
                     total = coalesce(total, 0), done = coalesce(done, 0), errors = coalesce(errors, 0)
                 where id in (select id from pillarbox_progress.project where owner = $1 order by id limit $2 for update)
                 returning id";
    sqlx::query_scalar(query).bind(owner).bind(limit).bind(NO_OWNER).fetch_all(db).await
}

/// Returns up to `limit` projects that have no owner any more.
pub(crate) async fn ownerless(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<String>> {
    let query = "select id from pillarbox_progress.project where owner = $1 order by created_at, id limit $2";
    sqlx::query_scalar(query).bind(NO_OWNER).bind(limit).fetch_all(db).await
}

/// Deletes up to `items_max` items of a project without an owner, and the project itself if it has no others. Returns whether it
/// is deleted. To be called in a transaction: the row of the counts is the lock of the items, so none is added meanwhile.
pub(crate) async fn delete_ownerless(tx: &mut PgConnection, id: &str, items_max: i64) -> sqlx::Result<bool> {
    let lock = "select from pillarbox_progress.state where project_id = $1 for update";
    sqlx::query(lock).bind(id).execute(&mut *tx).await?;
    let items = "delete from pillarbox_progress.item where project_id = $1 and item_id in
                     (select item_id from pillarbox_progress.item where project_id = $1 limit $2)";
    let deleted = sqlx::query(items).bind(id).bind(items_max).execute(&mut *tx).await?.rows_affected();
    if deleted >= items_max.unsigned_abs() {
        return Ok(false);
    }
    // Its counts and its completion have a foreign key with `on delete cascade`.
    let project = "delete from pillarbox_progress.project where id = $1 and owner = $2";
    sqlx::query(project).bind(id).bind(NO_OWNER).execute(tx).await?;
    Ok(true)
}

fn project_of(row: &PgRow) -> sqlx::Result<Project> {
    let finished_at: Option<DateTime<Utc>> = row.try_get("finished_at")?;
    let finished = finished_at.map(|at| Ok::<_, sqlx::Error>((snapshot_of(row)?, at))).transpose()?;
    let tenant: String = row.try_get("tenant")?;
    Ok(Project {
        id: row.try_get("id")?,
        tenant: tenant.try_into().map_err(|error: pillarbox::log::InvalidTenant| sqlx::Error::Decode(error.into()))?,
        owner: row.try_get("owner")?,
        token: row.try_get("token")?,
        run: row.try_get("run")?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
        finished,
    })
}

/// The counts in the columns `status`, `total`, `done` and `errors`.
pub(super) fn snapshot_of(row: &PgRow) -> sqlx::Result<Snapshot> {
    let status: &str = row.try_get("status")?;
    let status: Status = status.parse().map_err(|error: strum::ParseError| sqlx::Error::Decode(error.into()))?;
    Ok(Snapshot { status, total: row.try_get("total")?, done: row.try_get("done")?, errors: row.try_get("errors")? })
}
