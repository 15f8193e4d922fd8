//! Detects that the log runs in another cluster or database than the one it was written in.
//!
//! Transaction ids, and with them every position, are meaningless in another cluster; and a copy (of a staging system,
//! for example) must not send what the original sends. So a log that finds itself elsewhere is silent until an operator
//! runs `pillarbox recover`. A dump that was restored into the same database is recognised by the oid of the log's
//! table.

use sqlx::{PgConnection, PgPool};

use super::snapshot::Snapshot;

const IS_ELSEWHERE: &str = "
    cluster_identity.database_oid <> (select oid from pg_database where datname = current_database())
    or cluster_identity.system_identifier <> pillarbox.system_identifier()
    or cluster_identity.log_oid <> 'pillarbox.log'::regclass";

const CURRENT: &str = "
    system_identifier = pillarbox.system_identifier(),
    database_oid = (select oid from pg_database where datname = current_database()),
    log_oid = 'pillarbox.log'::regclass";

/// Returns the identifiers of the cluster and of the database.
pub async fn current(db: &PgPool) -> sqlx::Result<(i64, i64)> {
    let query = "select pillarbox.system_identifier(), oid::bigint from pg_database where datname = current_database()";
    sqlx::query_as(query).fetch_one(db).await
}

/// Records the identity of a new log, and marks a log that was written elsewhere as restored. Must run before anything
/// is posted: every message that is in the log by then counts as restored.
pub async fn check(db: &PgPool) -> sqlx::Result<()> {
    let mut db = db.acquire().await?;
    let now = Snapshot::now(&mut db).await?;
    // A new log, or one whose identity was never recorded completely.
    let record = format!(
        "update pillarbox.cluster_identity set {CURRENT} where log_oid is null and not ({IS_ELSEWHERE}) is true"
    );
    sqlx::query(sqlx::AssertSqlSafe(record)).execute(&mut *db).await?;
    let mark = format!(
        "update pillarbox.cluster_identity
         set {CURRENT}, floor = $1::pg_snapshot, floor_id = $2, floor_at = $3, restored_at = $3
         where {IS_ELSEWHERE}"
    );
    let marked = sqlx::query(sqlx::AssertSqlSafe(mark))
        .bind(&now.visible)
        .bind(now.id_before)
        .bind(now.at)
        .execute(&mut *db)
        .await?;
    if marked.rows_affected() > 0 {
        tracing::warn!(
            "this database was restored or copied: nothing is sent until an operator runs `pillarbox recover`"
        );
    }
    Ok(())
}

/// Returns whether the log was restored or copied and no operator has run `pillarbox recover` yet.
pub async fn is_restored(db: &mut PgConnection) -> sqlx::Result<bool> {
    let query = format!("select restored_at is not null or {IS_ELSEWHERE} from pillarbox.cluster_identity");
    Ok(sqlx::query_scalar::<_, Option<bool>>(sqlx::AssertSqlSafe(query)).fetch_one(db).await?.unwrap_or(false))
}
