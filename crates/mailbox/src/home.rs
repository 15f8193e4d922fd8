//! Whether this log is where it was written.
//!
//! Transaction ids, and with them every position, mean nothing in another cluster; and a copy (a staging system, say) must
//! not send what the original sends. So a log that finds itself elsewhere is silent until an operator says how to go on. A dump
//! that was restored into the same database shows by its tables, which were made anew.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};

use crate::moment::Moment;
use crate::{parked, replay};

const IS_ELSEWHERE: &str = "
    home.database_oid <> (select oid from pg_database where datname = current_database())
    or home.system_identifier <> pillarbox.system_identifier()
    or home.log_oid <> 'pillarbox.log'::regclass";

const HERE: &str = "
    system_identifier = pillarbox.system_identifier(),
    database_oid = (select oid from pg_database where datname = current_database()),
    log_oid = 'pillarbox.log'::regclass";

/// Where a restored log goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recover {
    /// What was posted from this time on is read again by everyone; inboxes keep their effects to one.
    From(DateTime<Utc>),
    /// Nothing that was restored is sent; what was parked is set aside as dead letters.
    Skip,
}

/// Which cluster this is, and which database there.
pub async fn whereabouts(db: &PgPool) -> sqlx::Result<(i64, i64)> {
    let query = "select pillarbox.system_identifier(), oid::bigint from pg_database where datname = current_database()";
    sqlx::query_as(query).fetch_one(db).await
}

/// Makes a new log at home here, and marks one that was written elsewhere. Called before anything is posted here: what
/// is there already is what was restored.
pub async fn settle(db: &PgPool) -> sqlx::Result<()> {
    let mut db = db.acquire().await?;
    let here = Moment::now(&mut db).await?;
    // A new one, or one from before all of this was kept.
    let unmarked = format!("update pillarbox.home set {HERE} where log_oid is null and not ({IS_ELSEWHERE}) is true");
    sqlx::query(sqlx::AssertSqlSafe(unmarked)).execute(&mut *db).await?;
    let query = format!(
        "update pillarbox.home
         set {HERE}, floor = $1::pg_snapshot, floor_id = $2, floor_at = $3, restored_at = $3
         where {IS_ELSEWHERE}"
    );
    let marked = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(&here.snapshot)
        .bind(here.id_before)
        .bind(here.at)
        .execute(&mut *db)
        .await?;
    if marked.rows_affected() > 0 {
        tracing::warn!(
            "this database was restored or copied: nothing is sent until `pillarbox recover` says how to go on"
        );
    }
    Ok(())
}

/// True until an operator has said how to go on.
pub async fn is_restored(db: &mut PgConnection) -> sqlx::Result<bool> {
    let query = format!("select restored_at is not null or {IS_ELSEWHERE} from pillarbox.home");
    Ok(sqlx::query_scalar::<_, Option<bool>>(sqlx::AssertSqlSafe(query)).fetch_one(db).await?.unwrap_or(false))
}

/// Lets the readers go on. False if the log was not restored: then nothing changes.
pub async fn recover(db: &PgPool, way: Recover) -> sqlx::Result<bool> {
    settle(db).await?;
    let mut tx = db.begin().await?;
    let is_recovered = recover_in(&mut tx, way).await?;
    tx.commit().await?;
    Ok(is_recovered)
}

/// The same in the caller's transaction, after [`settle`].
pub async fn recover_in(tx: &mut PgConnection, way: Recover) -> sqlx::Result<bool> {
    let query = "update pillarbox.home set restored_at = null where restored_at is not null returning floor_at";
    let floor_at: Option<DateTime<Utc>> = sqlx::query_scalar(query).fetch_optional(&mut *tx).await?;
    let Some(floor_at) = floor_at else { return Ok(false) };
    sqlx::raw_sql(
        "delete from pillarbox.lane;
         delete from pillarbox.replica;
         delete from pillarbox.replay_shard;
         delete from pillarbox.replay;
         update pillarbox.lease set owner = null, epoch = epoch + 1;
         update pillarbox.cursor set lapsed_at = null;
         insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
         select consumer, shards, last_ids, floor, floor_id, floor_at, floor, floor_id, floor_at
         from pillarbox.cursor cross join pillarbox.home
         cross join (select array_agg(shard) as shards, array_agg(0::bigint) as last_ids from pillarbox.shards() as shard) as every",
    )
    .execute(&mut *tx)
    .await?;
    match way {
        Recover::From(from) => {
            sqlx::query(
                "with made as (
                     insert into pillarbox.replay (consumer, run, from_at, to_at)
                     select consumer, 0, $1, $2 from pillarbox.cursor where $1 < $2 returning id)
                 insert into pillarbox.replay_shard (replay, shard) select id, pillarbox.shards() from made",
            )
            .bind(from)
            .bind(floor_at + replay::MARGIN)
            .execute(&mut *tx)
            .await?;
        }
        Recover::Skip => parked::set_aside(tx, None, "set aside by pillarbox recover --skip").await?,
    }
    Ok(true)
}
