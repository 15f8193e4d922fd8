//! What the log needs now and then.

use chrono::{DateTime, Utc};
use kit::worker::Round;
use sqlx::PgPool;

use crate::{idempotency, log};

/// With so many days made ahead, a week without anybody maintaining costs nothing; then messages overflow, and are kept.
const DAYS_AHEAD: i32 = 7;

const FORGET_MAX: i64 = 10_000;

/// PostgreSQL's code for a lock that was not to be had in time.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// Makes partitions ahead (someone who holds the lock has it: the next round is soon enough), and forgets answers that
/// have expired, so many at a time.
pub async fn round(db: &PgPool, now: DateTime<Utc>) -> Result<Round, sqlx::Error> {
    match log::make_partitions(&mut *db.acquire().await?, DAYS_AHEAD).await {
        Ok(0) => {}
        Ok(made) => tracing::info!(made, "made log partitions"),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => {
            tracing::info!("the log is locked by another session; its partitions can wait");
        }
        Err(error) => return Err(error),
    }
    match idempotency::forget_expired(&mut *db.acquire().await?, now, FORGET_MAX).await? {
        forgotten if forgotten == FORGET_MAX as u64 => Ok(Round::Busy),
        _ => Ok(Round::Idle),
    }
}
