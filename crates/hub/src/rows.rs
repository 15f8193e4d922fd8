//! How columns become values that PostgreSQL has no type for.

use chrono::{DateTime, Utc};
use pillarbox::log::LogRef;

use crate::deliveries::domain::Batch;

/// The columns of a reference to the log.
#[derive(sqlx::FromRow)]
pub(crate) struct LogColumns {
    log_shard: i16,
    log_id: i64,
    log_at: DateTime<Utc>,
}

impl From<LogColumns> for LogRef {
    fn from(LogColumns { log_shard: shard, log_id: id, log_at: at }: LogColumns) -> LogRef {
        LogRef { shard, id, at }
    }
}

/// A number that is not negative, or null.
#[derive(sqlx::Type)]
#[sqlx(transparent, no_pg_array)]
pub(crate) struct Unsigned(Option<i32>);

impl From<Unsigned> for Option<u32> {
    fn from(Unsigned(number): Unsigned) -> Option<u32> {
        number.map(i32::unsigned_abs)
    }
}

/// Numbers that are not negative.
#[derive(sqlx::Type)]
#[sqlx(transparent, no_pg_array)]
pub(crate) struct UnsignedList(Vec<i32>);

impl From<UnsignedList> for Vec<u32> {
    fn from(UnsignedList(numbers): UnsignedList) -> Vec<u32> {
        numbers.into_iter().map(i32::unsigned_abs).collect()
    }
}

/// The columns of the limits of a batch. Both are null, or neither is.
#[derive(sqlx::FromRow)]
pub(crate) struct BatchColumns {
    batch_max: Option<i16>,
    #[sqlx(try_from = "Unsigned")]
    batch_wait_ms: Option<u32>,
}

impl From<BatchColumns> for Option<Batch> {
    fn from(row: BatchColumns) -> Option<Batch> {
        let max = row.batch_max.map(|max| u32::from(max.unsigned_abs()));
        max.zip(row.batch_wait_ms).map(|(max, wait_ms)| Batch { max, wait_ms })
    }
}
