//! Deleted accounts and deleted tenants: their projects are deleted, in two steps. First the projects lose their owner, in the
//! transaction of the deletion. Then a worker deletes them with their counts and items, which can be millions of rows, or in Redis.

use contracts::identity::AccountDeleted;
use http_kit::auth::Principal;
use pillarbox::database::Database;
use pillarbox::log::Message;
use pillarbox::log::Tenant;
use runtime::worker::Round;
use sqlx::{PgConnection, Postgres, Transaction};

use crate::Progress;
use crate::domain::tenant_owner;
use crate::error::Error;
use crate::store::project as store;

/// Projects per statement.
const BATCH: i64 = 1_000;
/// Projects that a round of the worker deletes.
const PROJECTS: i64 = 100;
/// Items per transaction.
const ITEMS: i64 = 10_000;

/// Takes the projects from the user whose account was deleted, unfinished ones and archived ones.
pub(crate) async fn disown_projects(
    progress: &Progress,
    tx: &mut Transaction<'static, Postgres>,
    message: &Message,
) -> Result<(), Error> {
    let deleted: AccountDeleted = serde_json::from_str(message.payload.get())?;
    let owner = Principal::User(deleted.user_id).to_string();
    loop {
        let ids = store::disown(tx, &owner, BATCH).await?;
        for id in &ids {
            progress.projects.invalidate(id).await;
        }
        if (ids.len() as i64) < BATCH {
            return Ok(());
        }
    }
}

/// Takes up to `limit` projects from the API keys of a deleted tenant. Returns how many.
pub(crate) async fn disown_of_tenant(db: &mut PgConnection, tenant: &Tenant, limit: i64) -> sqlx::Result<u64> {
    Ok(store::disown(db, &tenant_owner(tenant), limit).await?.len() as u64)
}

/// Deletes some of the projects without an owner. The counts in Redis first: while it cannot be reached, the projects remain, and
/// the next round tries again.
pub(crate) async fn delete_ownerless(progress: &Progress, db: &Database) -> Result<Round, Error> {
    let ids = store::ownerless(&mut *db.acquire().await?, PROJECTS).await?;
    progress.state.delete(&ids).await?;
    let mut is_full = ids.len() as i64 >= PROJECTS;
    for id in &ids {
        let mut tx = db.begin().await?;
        is_full |= !store::delete_ownerless(&mut tx, id, ITEMS).await?;
        tx.commit().await?;
        progress.projects.invalidate(id).await;
    }
    Ok(if is_full { Round::Busy } else { Round::Idle })
}
