//! Periodic tasks. Every process with the role runs them.

use chrono::TimeDelta;
use pillarbox::database::{Database, time};
use runtime::worker::Round;

use crate::error::Error;
use crate::store::{project, state};

/// Rows per statement.
const BATCH: i64 = 1_000;
/// Projects whose items are deleted in one round.
const PROJECTS: i64 = 20;
/// Items per statement.
const ITEMS: i64 = 10_000;

/// Deletes what is no longer needed, by the database's time: the items of finished and of expired projects, and projects after
/// their retention.
pub(crate) async fn delete_old(db: &Database, retention: TimeDelta) -> Result<Round, Error> {
    let mut db = db.acquire().await?;
    let now = time::now(&mut db).await?;
    let unneeded = state::unneeded(&mut db, now, PROJECTS).await?;
    let mut is_full = unneeded.len() as i64 >= PROJECTS;
    for id in &unneeded {
        match state::delete_items(&mut db, id, now, ITEMS).await? as i64 {
            ITEMS.. => is_full = true,
            _ => state::delete(&mut db, id, now).await?,
        }
    }
    let deleted = project::delete_old(&mut db, now - retention, BATCH).await?;
    Ok(if is_full || deleted as i64 >= BATCH { Round::Busy } else { Round::Idle })
}
