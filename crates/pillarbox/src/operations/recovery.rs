//! Recovery of a log that was restored or copied.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};

use super::replays;
use crate::consumers::parked_messages;
use crate::database::cluster_identity;

/// Where the consumers of a restored log continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// All consumers replay the restored messages from this time on. Inboxes prevent second effects.
    From(DateTime<Utc>),
    /// No restored message is sent, and parked messages become dead letters.
    Skip,
}

/// Makes the consumers of a restored log continue. Returns false, and changes nothing, if the log was not restored.
pub async fn recover(db: &PgPool, recovery: Recovery) -> sqlx::Result<bool> {
    cluster_identity::check(db).await?;
    let mut tx = db.begin().await?;
    let is_recovered = recover_in(&mut tx, recovery).await?;
    tx.commit().await?;
    Ok(is_recovered)
}

/// The same in the caller's transaction. Requires a [`cluster_identity::check`] before.
pub async fn recover_in(tx: &mut PgConnection, recovery: Recovery) -> sqlx::Result<bool> {
    let query =
        "update pillarbox.cluster_identity set restored_at = null where restored_at is not null returning floor_at";
    let floor_at: Option<DateTime<Utc>> = sqlx::query_scalar(query).fetch_optional(&mut *tx).await?;
    let Some(floor_at) = floor_at else { return Ok(false) };
    sqlx::raw_sql(
        "delete from pillarbox.shard_worker;
         -- A dump contains the incarnation of the original, which the copy must not share.
         delete from pillarbox.incarnation;
         delete from pillarbox.replica;
         delete from pillarbox.replay_shard;
         delete from pillarbox.replay;
         update pillarbox.filter_change set replay_from = null where replay_from is not null;
         update pillarbox.lease set owner = null, epoch = epoch + 1;
         update pillarbox.cursor set lapsed_at = null;
         insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
         select consumer, shards, last_ids, floor, floor_id, floor_at, floor, floor_id, floor_at
         from pillarbox.cursor cross join pillarbox.cluster_identity
         cross join (select array_agg(shard) as shards, array_agg(0::bigint) as last_ids from pillarbox.shards() as shard) as every",
    )
    .execute(&mut *tx)
    .await?;
    match recovery {
        Recovery::From(from) => replays::request_for_all(tx, from, floor_at + replays::SNAPSHOT_MARGIN).await?,
        Recovery::Skip => drop(parked_messages::give_up_all(tx, None, "skipped by pillarbox recover --skip").await?),
    }
    Ok(true)
}
