//! Timed rounds.

use chrono::{DateTime, Duration, Utc};
use kit::worker::Round;
use mailbox::home;
use mailbox::maintain::Keep;
use sqlx::PgPool;

use crate::store::upkeep;

/// What dispatchers have followed within this time they do not need again.
const FOLLOWED: Duration = Duration::days(1);

/// For how long, in days.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub(crate) log: Keep,
    pub(crate) attempts: u32,
    pub(crate) dead_letters: u32,
}

/// Partitions ahead, an end for what is old, and a hold on the log for what is not yet sent.
pub(crate) async fn maintain(db: &PgPool, keep: Kept, now: DateTime<Utc>) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    let made = upkeep::make_partitions(&mut db).await?;
    if made > 0 {
        tracing::info!(made, "made partitions of the hub");
    }
    if home::is_restored(&mut db).await? {
        return Ok(Round::Idle);
    }
    let days = |count: u32| Duration::days(i64::from(count));
    let posted = upkeep::oldest_unsettled(&mut db).await?;
    // The log is held for so long only; a message whose event is gone dies as `expired`, and is seen.
    upkeep::hold_log(&mut db, posted.map(|at| at.max(now - days(keep.log.behind_days)))).await?;
    let messages_until = now - days(keep.log.log_days);
    // What waits, for one that is paused, say, must not hold up a whole day of everybody's.
    if upkeep::carry_on(&mut db, messages_until, now).await? == upkeep::CARRY_MAX {
        return Ok(Round::Busy);
    }
    upkeep::carry_positions(&mut db, messages_until, now).await?;
    upkeep::drop_days(&mut db, &["message", "unsent"], messages_until).await?;
    // A position is of use as long as there are messages that it has passed.
    upkeep::drop_days(&mut db, &["position"], messages_until - Duration::days(1)).await?;
    upkeep::drop_days(&mut db, &["attempt"], (now - days(keep.attempts)).min(messages_until)).await?;
    upkeep::forget_dead_letters(&mut db, now - days(keep.dead_letters)).await?;
    upkeep::forget(&mut db, now - FOLLOWED).await?;
    Ok(Round::Idle)
}

pub(crate) async fn measure(db: &PgPool) -> Result<Round, sqlx::Error> {
    let (pending, dead) = upkeep::sizes(&mut *db.acquire().await?).await?;
    metrics::gauge!("eventhub_pending_messages").set(pending as f64);
    metrics::gauge!("eventhub_dlq_size").set(dead as f64);
    Ok(Round::Idle)
}
