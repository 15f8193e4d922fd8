//! Saving: the changes of many subscriber queues in one transaction, fenced by the lease.
//!
//! At most one save is in flight. If it fails for a reason that may pass, the dispatcher sends nothing until a retry of the
//! same save succeeds: a later save must not overtake it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use mailbox::consumers::Fence;
use mailbox::database::step;
use mailbox::log::post_all;
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{DATABASE_RETRY_PAUSE, DispatchError, Dispatcher, TaskResult, finished, flatten};
use crate::delivery::Changes;
use crate::store;
use crate::system_event::{self, SYSTEM_SOURCE};

/// The minimum time between two saves. The changes of this time are saved together, which avoids a third of the database's
/// work. After a crash, what was delivered in this time is sent again.
const SAVE_PAUSE_MIN: Duration = Duration::from_millis(20);
/// Save at once when this many subscribers have changes.
const FULL_BATCH: usize = 1_000;

pub(super) struct Saver {
    pub(super) in_flight: Option<(Arc<Changes>, JoinHandle<sqlx::Result<bool>>)>,
    /// Changes whose save failed. Nothing is sent until they are saved.
    pub(super) failed: Option<Arc<Changes>>,
    saved_at: Instant,
    /// The counts of queues that were removed. They are saved together with the next changes.
    pub(super) left_over: Changes,
}

impl Saver {
    pub(super) fn new() -> Saver {
        Saver { in_flight: None, failed: None, saved_at: Instant::now(), left_over: Changes::default() }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_none() && self.failed.is_none()
    }

    /// Drops all changes. They may be stale, and a save in flight must not commit after the queues are loaded again.
    pub(super) fn reset(&mut self) {
        if let Some((_, save)) = &self.in_flight {
            save.abort();
        }
        (self.in_flight, self.failed, self.left_over) = (None, None, Changes::default());
    }

    /// When the next save may start, unless the batch is full earlier.
    pub(super) fn next_save(&self) -> Instant {
        self.saved_at + SAVE_PAUSE_MIN
    }

    fn start(&mut self, db: &PgPool, time_max: Duration, fence: Fence, changes: Arc<Changes>, now: DateTime<Utc>) {
        if changes.is_empty() {
            return; // The rate-limited changes of the queues are not due yet.
        }
        let (db, saved) = (db.clone(), changes.clone());
        let save = tokio::spawn(async move { save_changes(&db, time_max, fence, &saved, now).await });
        self.in_flight = Some((changes, save));
    }
}

/// Saves all changes or none. Returns false, without saving, if this process has lost the lease.
pub(super) async fn save_changes(
    db: &PgPool,
    time_max: Duration,
    fence: Fence,
    changes: &Changes,
    now: DateTime<Utc>,
) -> sqlx::Result<bool> {
    let saving = async {
        let mut tx = db.begin().await?;
        if !fence.lock(&mut tx).await? {
            return Ok(false);
        }
        let disabled = store::delivery_writes::save(&mut tx, changes, now).await?;
        let reports = system_event::reports(changes, &disabled, now);
        if !reports.is_empty() {
            post_all(&mut tx, &SYSTEM_SOURCE, &reports).await.map_err(system_event::database_error)?;
        }
        tx.commit().await?;
        Ok(true)
    };
    step(db, "save outcomes", time_max, saving).await
}

impl Dispatcher {
    /// Starts a save if one is due, or the retry of a failed one. Before a rebalance no save is started: the rebalance
    /// saves all changes itself.
    pub(super) fn start_save(&mut self, now: DateTime<Utc>) {
        if self.saver.in_flight.is_some() || (self.saver.failed.is_none() && self.ownership.is_rebalance_due()) {
            return;
        }
        let (time_max, fence) = (self.step_time_max, self.ownership.fence());
        if let Some(changes) = self.saver.failed.take() {
            return self.saver.start(&self.db, time_max, fence, changes, now);
        }
        let count = self.changed_queues(now).take(FULL_BATCH).count();
        if count > 0 && (count == FULL_BATCH || Instant::now() >= self.saver.next_save()) {
            let changes = self.drain_changes(now);
            self.saver.start(&self.db, time_max, fence, changes, now);
        }
    }

    /// Saves all changes and waits for the result: the next owner of a shard must find the outcomes of its messages.
    pub(super) async fn flush(&mut self) -> Result<(), DispatchError> {
        if self.has_changes() {
            let now = self.clock.now();
            let changes = self.drain_changes(now);
            self.saver.start(&self.db, self.step_time_max, self.ownership.fence(), changes, now);
        }
        if self.saver.in_flight.is_some() {
            let saved = finished(self.saver.in_flight.as_mut().map(|(_, save)| save)).await;
            self.finish_save(saved)?;
        }
        Ok(())
    }

    pub(super) fn has_changes(&self) -> bool {
        self.changed_queues(self.clock.now()).next().is_some()
    }

    fn changed_queues(&self, now: DateTime<Utc>) -> impl Iterator<Item = ()> {
        let queues = self.scheduler.active().filter_map(|subscriber| self.queues.get(subscriber));
        queues.filter(move |queue| queue.has_changes(now)).map(drop)
    }

    /// Takes the due changes of all subscriber queues.
    fn drain_changes(&mut self, now: DateTime<Utc>) -> Arc<Changes> {
        let mut changes = std::mem::take(&mut self.saver.left_over);
        for subscriber in self.scheduler.active() {
            if let Some(queue) = self.queues.get_mut(subscriber)
                && queue.has_changes(now)
            {
                queue.drain_changes(now, &mut changes);
            }
        }
        Arc::new(changes)
    }

    pub(super) fn finish_save(&mut self, saved: TaskResult<bool>) -> Result<(), DispatchError> {
        let Some((changes, _)) = self.saver.in_flight.take() else { return Ok(()) };
        self.saver.saved_at = Instant::now();
        match flatten(saved) {
            Ok(true) => {
                count_attempts(&changes);
                self.totals.record(&changes.attempts);
                Ok(())
            }
            Ok(false) => {
                self.lose_lease();
                Ok(())
            }
            Err(error) if error.is_transient() => {
                self.saver.failed = Some(changes);
                self.retry_at = Some(Instant::now() + DATABASE_RETRY_PAUSE);
                Err(error)
            }
            // The database would refuse this save every time. The messages are sent again.
            Err(error) => {
                self.reset();
                Err(error)
            }
        }
    }
}

fn count_attempts(changes: &Changes) {
    let latency = metrics::histogram!("eventhub_delivery_latency_seconds");
    let mut counts: HashMap<&'static str, u64> = HashMap::new();
    for attempt in &changes.attempts {
        *counts.entry(attempt.outcome.as_str()).or_default() += 1;
        if attempt.result.not_sent.is_none() {
            latency.record(attempt.result.latency.as_secs_f64());
        }
    }
    for (outcome, count) in counts {
        metrics::counter!("eventhub_messages_delivered_total", "outcome" => outcome).increment(count);
    }
}
