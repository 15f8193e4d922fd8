//! What the log needs now and then.

use kit::worker::Round;
use sqlx::PgPool;

use crate::log;

/// With so many days made ahead, a week without anybody maintaining costs nothing; then messages overflow, and are kept.
const DAYS_AHEAD: i32 = 7;

/// PostgreSQL's code for a lock that was not to be had in time.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// Makes partitions ahead. Someone who holds the lock has it: the next round is soon enough.
pub async fn round(db: &PgPool) -> Result<Round, sqlx::Error> {
    match log::make_partitions(&mut *db.acquire().await?, DAYS_AHEAD).await {
        Ok(0) => {}
        Ok(made) => tracing::info!(made, "made log partitions"),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => {
            tracing::info!("the log is locked by another session; its partitions can wait");
        }
        Err(error) => return Err(error),
    }
    Ok(Round::Idle)
}
