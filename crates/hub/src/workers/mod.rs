//! Periodic tasks: maintenance of the hub's tables, and their metrics.

mod store;

use chrono::Duration;
use pillarbox::database::{cluster_identity, step, time};
use pillarbox::operations::maintenance::Retention;
use runtime::worker::Round;
use sqlx::PgPool;

use crate::replays::domain::ReplayState;
use crate::streams::store::maintenance::StreamLag;
use crate::{events, health, replays, streams};

/// How long the batches of fan-out and expired secrets are retained. Dispatchers need a batch for seconds only.
const BATCH_RETENTION: Duration = Duration::days(1);
/// Rejections that one statement deletes.
const REJECTIONS_MAX: i64 = 10_000;
/// How long the response times of all subscribers together are retained. The overview shows those of some minutes.
const LATENCY_RETENTION: Duration = Duration::hours(1);
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
    pub(crate) health: u32,
}

/// Creates partitions ahead, deletes old data, and holds the log for messages that are not sent yet; all by the database's
/// time. Returns `Busy` if there is more to do at once.
pub(crate) async fn maintain(db: &PgPool, retention: HubRetention) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    let created = store::create_partitions(&mut db).await?;
    if created > 0 {
        tracing::info!(created, "created partitions of the hub");
    }
    if cluster_identity::is_restored(&mut db).await? {
        return Ok(Round::Idle);
    }
    let now = time::now(&mut db).await?;
    let days = |count: u32| Duration::days(i64::from(count));
    let held = events::store::retention_hold::version(&mut db).await?;
    let pending = store::oldest_pending(&mut db).await?;
    let replayed = replays::store::oldest_unread(&mut db).await?;
    let unread = streams::store::maintenance::oldest_unread(&mut db).await?;
    let oldest = pending.into_iter().chain(replayed).chain(unread).min();
    // The log is held for `behind_days` at most. A message whose event is no longer in the log becomes a dead letter with
    // the reason `expired`.
    store::set_retention_hold(&mut db, oldest.map(|at| at.max(now - days(retention.log.behind_days)))).await?;
    events::store::retention_hold::merge(&mut db, held).await?;
    let messages_until = now - days(retention.log.log_days);
    // What streams have not read is retained as long as the log is held for it.
    let read_until = unread.map_or(messages_until, |unread| unread.max(now - days(retention.log.behind_days)));
    streams::store::maintenance::drop_days(&mut db, messages_until.min(read_until)).await?;
    streams::store::maintenance::delete_batches(&mut db, now - BATCH_RETENTION).await?;
    // The pending messages of a single paused subscriber must not retain a whole day of the messages of all subscribers.
    if store::move_pending(&mut db, messages_until, now).await? == store::MOVED_MAX {
        return Ok(Round::Busy);
    }
    store::drop_days(&mut db, &["message", "skipped"], messages_until).await?;
    // A position is needed as long as there are messages before it.
    store::drop_positions(&mut db, messages_until - Duration::days(1)).await?;
    store::drop_days(&mut db, &["attempt"], (now - days(retention.attempts)).min(messages_until)).await?;
    store::drop_days(&mut db, &["health"], now - days(retention.health)).await?;
    // A rejected event that the log no longer has cannot be retried.
    if events::store::rejected::delete_before(&mut db, messages_until, REJECTIONS_MAX).await? == REJECTIONS_MAX as u64 {
        return Ok(Round::Busy);
    }
    store::delete_dead_letters(&mut db, now - days(retention.dead_letters)).await?;
    store::delete_obsolete(&mut db, now - BATCH_RETENTION).await?;
    health::store::overview::delete_minutes(&mut db, now - LATENCY_RETENTION).await?;
    replays::store::delete_ended(&mut db, now - days(retention.attempts)).await?;
    Ok(Round::Idle)
}

/// Sets the gauges of pending and stale messages, dead letters and streams. Those that cannot be measured are unknown: a gauge that
/// kept its last value would hide that messages wait. The measurements do not depend on each other.
pub(crate) async fn measure(db: &PgPool) -> Result<Round, sqlx::Error> {
    let sizes = async { store::sizes(&mut *db.acquire().await?).await };
    let sizes = step(db, "measure the hub", MEASURE_TIME_MAX, sizes).await;
    metrics::gauge!("eventhub_pending_messages").set(sizes.as_ref().map_or(f64::NAN, |sizes| sizes.pending as f64));
    metrics::gauge!("eventhub_dlq_size").set(sizes.as_ref().map_or(f64::NAN, |sizes| sizes.dead as f64));
    let stale = async { store::stale(&mut *db.acquire().await?, STALE_AFTER).await };
    let stale = step(db, "count stale messages", MEASURE_TIME_MAX, stale).await;
    metrics::gauge!("pillarbox_hub_stale_messages").set(stale.as_ref().map_or(f64::NAN, |stale| *stale as f64));
    let replays = async { replays::store::count_by_state(&mut *db.acquire().await?).await };
    let replays = step(db, "count replays", MEASURE_TIME_MAX, replays).await;
    for state in [ReplayState::Pending, ReplayState::Running, ReplayState::Paused].map(ReplayState::as_str) {
        let count = replays.as_ref().map(|counts| counts.get(state).copied().unwrap_or_default() as f64);
        metrics::gauge!("pillarbox_hub_replays", "state" => state).set(count.unwrap_or(f64::NAN));
    }
    let lag = async { streams::store::maintenance::lag(&mut *db.acquire().await?).await };
    let lag = step(db, "measure streams", MEASURE_TIME_MAX, lag).await;
    let value = |of: fn(&StreamLag) -> f64| lag.as_ref().map_or(f64::NAN, of);
    metrics::gauge!("pillarbox_hub_stream_lag_messages").set(value(|lag| lag.messages as f64));
    metrics::gauge!("pillarbox_hub_stream_lag_seconds").set(value(|lag| lag.seconds));
    metrics::gauge!("pillarbox_hub_streams_lapsed").set(value(|lag| lag.lapsed as f64));
    sizes.and(stale).and(replays).and(lag).map(|_| Round::Idle)
}
