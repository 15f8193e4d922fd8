//! Saving: the changes of many subscriber queues in one transaction, fenced by the lease.
//!
//! At most one save is in flight. If it fails for a reason that may pass, the dispatcher sends nothing until a retry of the
//! same save succeeds: a later save must not overtake it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use pillarbox::consumers::Fence;
use pillarbox::database::step;
use pillarbox::log::post_all;
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::changes::Changes;
use super::queues::Queues;
use super::reports::{database_error, reports};
use super::subscriber_queue::SubscriberQueue;
use super::{DispatchError, TaskResult, finished, flatten, store};
use crate::deliveries::system_event::SYSTEM_SOURCE;

/// The minimum time between two saves. The changes of this time are saved together, which avoids a third of the database's
/// work. After a crash, what was delivered in this time is sent again.
const SAVE_PAUSE_MIN: Duration = Duration::from_millis(20);
/// Save at once when this many subscribers have changes.
const FULL_BATCH: usize = 1_000;

pub(super) struct Saver {
    db: PgPool,
    /// The time limit of one save.
    step_time_max: Duration,
    in_flight: Option<(Arc<Changes>, JoinHandle<sqlx::Result<bool>>)>,
    /// Changes whose save failed. Nothing is sent until they are saved.
    failed: Option<Arc<Changes>>,
    saved_at: Instant,
    /// The counts of queues that were removed. They are saved together with the next changes.
    left_over: Changes,
}

/// How a save has ended.
pub(super) enum Saved {
    All(Arc<Changes>),
    /// Nothing was saved, because another process owns the shards.
    LeaseLost,
}

impl Saver {
    pub(super) fn new(db: PgPool, step_time_max: Duration) -> Saver {
        let (saved_at, left_over) = (Instant::now(), Changes::default());
        Saver { db, step_time_max, in_flight: None, failed: None, saved_at, left_over }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_none() && self.failed.is_none()
    }

    pub(super) fn is_saving(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether the last save failed and was not repeated yet. Nothing may be sent until it is.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Drops all changes. They may be stale, and a save in flight must not commit after the queues are loaded again.
    pub(super) fn reset(&mut self) {
        if let Some((_, save)) = &self.in_flight {
            save.abort();
        }
        (self.in_flight, self.failed, self.left_over) = (None, None, Changes::default());
    }

    /// When the next save may start, unless the batch is full earlier. None while a save is in flight.
    pub(super) fn next_save(&self) -> Option<Instant> {
        self.in_flight.is_none().then(|| self.saved_at + SAVE_PAUSE_MIN)
    }

    /// Saves the counts of a queue that was removed together with the next changes.
    pub(super) fn add_left_over(&mut self, queue: &mut SubscriberQueue) {
        queue.drain_health(&mut self.left_over);
    }

    /// Starts a save if one is due, or the retry of a failed one.
    pub(super) fn start_due(&mut self, fence: Fence, queues: &mut Queues, now: DateTime<Utc>) {
        if self.in_flight.is_some() {
            return;
        }
        if let Some(changes) = self.failed.take() {
            return self.start(fence, changes, now);
        }
        let count = queues.count_changed(now, FULL_BATCH);
        if count > 0 && (count == FULL_BATCH || Instant::now() >= self.saved_at + SAVE_PAUSE_MIN) {
            self.start_all(fence, queues, now);
        }
    }

    /// Starts a save of all changes that are due.
    pub(super) fn start_all(&mut self, fence: Fence, queues: &mut Queues, now: DateTime<Utc>) {
        let mut changes = std::mem::take(&mut self.left_over);
        queues.drain_changes(now, &mut changes);
        self.start(fence, Arc::new(changes), now);
    }

    fn start(&mut self, fence: Fence, changes: Arc<Changes>, now: DateTime<Utc>) {
        if changes.is_empty() {
            return; // The rate-limited changes of the queues are not due yet.
        }
        let (db, time_max, saved) = (self.db.clone(), self.step_time_max, changes.clone());
        let save = tokio::spawn(async move { save_changes(&db, time_max, fence, &saved, now).await });
        self.in_flight = Some((changes, save));
    }

    /// Waits until the save in flight ends. Never returns if there is none.
    pub(super) async fn finished(&mut self) -> TaskResult<bool> {
        finished(self.in_flight.as_mut().map(|(_, save)| save)).await
    }

    /// Ends the save in flight. None if there was none. After a failure that may pass, the same changes are saved again.
    pub(super) fn finish(&mut self, saved: TaskResult<bool>) -> Result<Option<Saved>, DispatchError> {
        let Some((changes, _)) = self.in_flight.take() else { return Ok(None) };
        self.saved_at = Instant::now();
        match flatten(saved) {
            Ok(true) => {
                count_attempts(&changes);
                Ok(Some(Saved::All(changes)))
            }
            Ok(false) => Ok(Some(Saved::LeaseLost)),
            Err(error) => {
                self.failed = Some(changes).filter(|_| error.is_transient());
                Err(error)
            }
        }
    }

    /// Saves everything that is not saved yet: first the changes of a failed or interrupted save, then those of the queues.
    pub(super) async fn save_all(
        &mut self,
        fence: impl Fn() -> Fence,
        queues: &mut Queues,
        now: DateTime<Utc>,
    ) -> sqlx::Result<()> {
        if let Some((changes, save)) = self.in_flight.take()
            && !matches!(save.await, Ok(Ok(true)))
        {
            self.failed = Some(changes);
        }
        if let Some(changes) = self.failed.take()
            && !save_changes(&self.db, self.step_time_max, fence(), &changes, now).await?
        {
            return Ok(()); // The lease is lost: the new owner sends these messages again.
        }
        let mut changes = std::mem::take(&mut self.left_over);
        queues.drain_all(now, &mut changes);
        save_changes(&self.db, self.step_time_max, fence(), &changes, now).await.map(drop)
    }
}

/// Saves all changes or none. Returns false, without saving, if this process has lost the lease.
async fn save_changes(
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
        let disabled = store::writes::save(&mut tx, changes, now).await?;
        let reports = reports(changes, &disabled, now);
        if !reports.is_empty() {
            post_all(&mut tx, &SYSTEM_SOURCE, &reports).await.map_err(database_error)?;
        }
        tx.commit().await?;
        Ok(true)
    };
    step(db, "save outcomes", time_max, saving).await
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
