//! Scores the events of the trending feed.

use chrono::TimeDelta;
use mailbox::database::time;
use sqlx::PgPool;

use crate::store::trending as store;

/// Scores all published events that have not ended, as a new epoch. Returns the epoch; None if another process is
/// scoring, or if the newest epoch is not older than `every`. Ages are measured by the database's time.
pub(crate) async fn score(db: &PgPool, every: TimeDelta) -> sqlx::Result<Option<i64>> {
    let mut tx = db.begin().await?;
    let now = time::now(&mut tx).await?;
    let is_locked = store::try_lock(&mut tx).await?;
    let newest = store::newest(&mut tx).await?;
    if !is_locked || newest.is_some_and(|(_, scored_at)| scored_at > now - every) {
        return Ok(None);
    }
    let epoch = newest.map_or(1, |(epoch, _)| epoch + 1);
    store::score(&mut tx, epoch, now).await?;
    tx.commit().await?;
    Ok(Some(epoch))
}
