//! Periodic tasks: maintenance of the hub's tables, and their metrics.

use chrono::Duration;
use kit::worker::Round;
use mailbox::database::{cluster_identity, step, time};
use mailbox::operations::maintenance::Retention;
use sqlx::PgPool;

use crate::store::maintenance;

/// How long the batches of fan-out and expired secrets are retained. Dispatchers need a batch for seconds only.
const BATCH_RETENTION: Duration = Duration::days(1);
/// Messages that nothing holds back are stale after this time: no dispatcher sends them, or not fast enough.
const STALE_AFTER: Duration = Duration::seconds(60);
/// The time limit of one measurement, which counts rows.
const MEASURE_TIME_MAX: std::time::Duration = std::time::Duration::from_secs(15);

/// How long data is retained, in days.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HubRetention {
    pub(crate) log: Retention,
    pub(crate) attempts: u32,
    pub(crate) dead_letters: u32,
}

/// Creates partitions ahead, deletes old data, and holds the log for messages that are not sent yet; all by the database's
/// time. Returns `Busy` if there is more to do at once.
pub(crate) async fn maintain(db: &PgPool, retention: HubRetention) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    let created = maintenance::create_partitions(&mut db).await?;
    if created > 0 {
        tracing::info!(created, "created partitions of the hub");
    }
    if cluster_identity::is_restored(&mut db).await? {
        return Ok(Round::Idle);
    }
    let now = time::now(&mut db).await?;
    let days = |count: u32| Duration::days(i64::from(count));
    let held = maintenance::retention_hold_version(&mut db).await?;
    let oldest = maintenance::oldest_pending(&mut db).await?;
    // The log is held for `behind_days` at most. A message whose event is no longer in the log becomes a dead letter with
    // the reason `expired`.
    maintenance::set_retention_hold(&mut db, oldest.map(|at| at.max(now - days(retention.log.behind_days)))).await?;
    maintenance::merge_retention_hold(&mut db, held).await?;
    let messages_until = now - days(retention.log.log_days);
    // The pending messages of a single paused subscriber must not retain a whole day of everybody's messages.
    if maintenance::move_pending(&mut db, messages_until, now).await? == maintenance::MOVED_MAX {
        return Ok(Round::Busy);
    }
    maintenance::drop_days(&mut db, &["message", "skipped"], messages_until).await?;
    // A position is needed as long as there are messages before it.
    maintenance::drop_positions(&mut db, messages_until - Duration::days(1)).await?;
    maintenance::drop_days(&mut db, &["attempt"], (now - days(retention.attempts)).min(messages_until)).await?;
    maintenance::delete_dead_letters(&mut db, now - days(retention.dead_letters)).await?;
    maintenance::delete_obsolete(&mut db, now - BATCH_RETENTION).await?;
    Ok(Round::Idle)
}

/// Sets the gauges of pending and stale messages and dead letters. Those that cannot be measured are unknown: a gauge that
/// kept its last value would hide that messages wait. The measurements do not depend on each other.
pub(crate) async fn measure(db: &PgPool) -> Result<Round, sqlx::Error> {
    let sizes = async { maintenance::sizes(&mut *db.acquire().await?).await };
    let sizes = step(db, "measure the hub", MEASURE_TIME_MAX, sizes).await;
    let (pending, dead) =
        sizes.as_ref().map_or((f64::NAN, f64::NAN), |(pending, dead)| (*pending as f64, *dead as f64));
    metrics::gauge!("eventhub_pending_messages").set(pending);
    metrics::gauge!("eventhub_dlq_size").set(dead);
    let stale = async { maintenance::stale(&mut *db.acquire().await?, STALE_AFTER).await };
    let stale = step(db, "count stale messages", MEASURE_TIME_MAX, stale).await;
    metrics::gauge!("eventhub_stale_messages").set(stale.as_ref().map_or(f64::NAN, |stale| *stale as f64));
    sizes.and(stale).map(|_| Round::Idle)
}
