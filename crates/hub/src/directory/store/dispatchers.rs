//! Which version of the directory each dispatcher has applied.

use pillarbox::consumers::existing_workers;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::DISPATCH;
use crate::directory::domain::DirectoryVersion;
use crate::directory::store::VersionColumns;

/// How far the dispatchers follow the directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Applied {
    pub(crate) newest: DirectoryVersion,
    /// The oldest version that a live dispatcher has applied; None if there is no live dispatcher.
    pub(crate) oldest_applied: Option<i64>,
}

/// Registers a dispatcher that has applied no version yet, and deletes stale rows.
pub(crate) async fn register(db: &mut PgConnection, owner: Uuid) -> sqlx::Result<()> {
    // A dispatcher becomes a shard worker before it has a row here, so a row without a worker is stale.
    let owners: Vec<Uuid> =
        sqlx::query_scalar("select owner from pillarbox_hub.dispatcher").fetch_all(&mut *db).await?;
    let existing = existing_workers(db, DISPATCH, &owners).await?;
    let is_stale = |owner: &Uuid| !existing.iter().any(|(existing, _)| existing == owner);
    let stale: Vec<Uuid> = owners.into_iter().filter(is_stale).collect();
    let query = "delete from pillarbox_hub.dispatcher where owner = any($1)";
    sqlx::query(query).bind(stale).execute(&mut *db).await?;
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
    #[derive(sqlx::FromRow)]
    struct Versions {
        #[sqlx(flatten, try_from = "VersionColumns")]
        newest: DirectoryVersion,
        owners: Vec<Uuid>,
        versions: Vec<i64>,
    }
    let query = "select directory.version, (select id from pillarbox.incarnation) as incarnation,
                        array(select owner from pillarbox_hub.dispatcher order by owner) as owners,
                        array(select dispatcher.version from pillarbox_hub.dispatcher order by owner) as versions
                 from pillarbox_hub.directory";
    let Versions { newest, owners, versions } = sqlx::query_as(query).fetch_one(&mut *db).await?;
    // A dispatcher that registers in between loads the directory afterwards, so it need not be found.
    let existing = existing_workers(db, DISPATCH, &owners).await?;
    let is_live = |owner: &Uuid| existing.iter().any(|(existing, is_live)| existing == owner && *is_live);
    let live = owners.iter().zip(versions).filter(|(owner, _)| is_live(owner));
    Ok(Applied { newest, oldest_applied: live.map(|(_, version)| version).min() })
}
