//! Which version of the directory each dispatcher has applied.

use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::DISPATCH;
use crate::hub_message::DirectoryVersion;
use crate::store::subscriber::version_of;

/// How far the dispatchers follow the directory.
pub(crate) struct Applied {
    pub(crate) newest: DirectoryVersion,
    /// The oldest version that a live dispatcher has applied; None if there is no live dispatcher.
    pub(crate) oldest_applied: Option<i64>,
}

/// Registers a dispatcher that has applied no version yet, and deletes the rows of those that are gone.
pub(crate) async fn register(db: &mut PgConnection, owner: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox_hub.dispatcher
                 where not exists (select from pillarbox.shard_worker
                                   where shard_worker.consumer = $1 and shard_worker.owner = dispatcher.owner)";
    sqlx::query(query).bind(DISPATCH).execute(&mut *db).await?;
    let query = "insert into pillarbox_hub.dispatcher (owner, version) values ($1, 0) on conflict (owner) do nothing";
    sqlx::query(query).bind(owner).execute(db).await.map(drop)
}

/// Saves the version that a dispatcher has applied.
pub(crate) async fn set_applied(db: &mut PgConnection, owner: Uuid, version: i64) -> sqlx::Result<()> {
    let query = "insert into pillarbox_hub.dispatcher (owner, version) values ($1, $2)
                 on conflict (owner) do update set version = excluded.version";
    sqlx::query(query).bind(owner).bind(version).execute(db).await.map(drop)
}

/// Deletes the row of a dispatcher that stops.
pub(crate) async fn remove(db: &mut PgConnection, owner: Uuid) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_hub.dispatcher where owner = $1").bind(owner).execute(db).await.map(drop)
}

/// Returns the newest version of the directory and the oldest one that a live dispatcher has applied. A dispatcher whose
/// process has stopped sending heartbeats is not live when its lease has expired: then it sends nothing.
pub(crate) async fn applied(db: &mut PgConnection) -> sqlx::Result<Applied> {
    let query = "select directory.version, (select id from pillarbox.incarnation) as incarnation,
                        (select min(dispatcher.version) from pillarbox_hub.dispatcher
                         join pillarbox.shard_worker
                           on shard_worker.consumer = $1 and shard_worker.owner = dispatcher.owner
                         join pillarbox.replica on replica.id = shard_worker.replica and replica.until > now()) as applied
                 from pillarbox_hub.directory";
    let row = sqlx::query(query).bind(DISPATCH).fetch_one(db).await?;
    Ok(Applied { newest: version_of(&row)?, oldest_applied: row.try_get("applied")? })
}
