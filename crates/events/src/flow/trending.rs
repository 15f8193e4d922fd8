//! Scores the events of the trending feed.

use chrono::TimeDelta;
use pillarbox::database::time;
use sqlx::PgPool;

use crate::store::trending as store;

/// A publication may commit this long after the time that is recorded for it.
const COMMIT_TIME_MAX: TimeDelta = TimeDelta::minutes(1);

/// The outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scored {
    /// All events were scored, as this epoch.
    All(i64),
    /// This many events were published lately and belong to the newest epoch now, if they did not before.
    New(usize),
    /// Nothing was to do, or another process does it.
    Nothing,
}

/// Scores all published events that have not ended, as a new epoch, if the newest epoch is older than `every`. Otherwise adds
/// the events that were published since to the newest epoch. Ages are measured by the database's time.
pub(crate) async fn score(db: &PgPool, every: TimeDelta) -> sqlx::Result<Scored> {
    let mut tx = db.begin().await?;
    let now = time::now(&mut tx).await?;
    if !store::try_lock(&mut tx).await? {
        return Ok(Scored::Nothing);
    }
    let (epoch, scored_at) = match store::newest(&mut tx).await? {
        Some((epoch, scored_at)) if scored_at > now - every => (epoch, scored_at),
        newest => {
            let epoch = newest.map_or(1, |(epoch, _)| epoch + 1);
            store::score(&mut tx, epoch, now).await?;
            tx.commit().await?;
            return Ok(Scored::All(epoch));
        }
    };
    let since = store::extended_at(&mut tx, epoch).await?.unwrap_or(scored_at) - COMMIT_TIME_MAX;
    let published = store::published_since(&mut tx, since).await?;
    if published.is_empty() {
        return Ok(Scored::Nothing);
    }
    store::extend(&mut tx, epoch, &published, now).await?;
    store::set_extended(&mut tx, epoch, now).await?;
    tx.commit().await?;
    Ok(Scored::New(published.len()))
}
