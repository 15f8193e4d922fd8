//! Waits until a change to a subscriber holds everywhere.
//!
//! Fan-out reads the version of the directory in each of its transactions, so it follows a change at once. A dispatcher has
//! the subscribers of its shards in memory, and loads them again when it learns of a new version. It tells in the table
//! `pillarbox_hub.dispatcher` which version it has applied; a request that has changed a subscriber is answered when all
//! live dispatchers have applied its change. A dispatcher in the process of the request learns of the change in memory, the
//! others with their next poll. The requests of a process share their checks: however many wait, there is one at a time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pillarbox::consumers::has_unknown_workers;
use pillarbox::database::Database;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::DISPATCH;
use crate::directory::domain::DirectoryVersion;
use crate::directory::store;
use crate::directory::store::dispatchers::Applied;

/// The pause between two checks whether other processes have applied a change. It grows from the first to the second value.
const CHECK_PAUSE: Duration = Duration::from_millis(5);
const CHECK_PAUSE_MAX: Duration = Duration::from_millis(200);
/// The pause between two warnings of a process: every request that waits in vain would log one.
const WARNING_PAUSE: Duration = Duration::from_secs(10);

/// What the requests and the dispatcher of one process tell each other about the directory.
#[derive(Debug, Clone)]
pub(crate) struct DirectorySync {
    /// The newest version that a request of this process knows.
    newest: watch::Sender<Option<DirectoryVersion>>,
    /// Counts the versions that the dispatcher of this process has applied.
    applied: watch::Sender<u64>,
    /// The last check of the database, for all requests.
    checks: Arc<SharedChecks<Check>>,
    warned_at: Arc<Mutex<Option<Instant>>>,
    /// How long a dispatcher may send without a heartbeat.
    lease_time: Duration,
}

/// What the database tells about the dispatchers.
#[derive(Debug, Clone, Copy)]
struct Check {
    applied: Applied,
    /// The rows of dispatchers are lost in a failover; one that has not noticed it may still send what it holds.
    has_unknown_workers: bool,
}

impl DirectorySync {
    pub(crate) fn new(lease_time: Duration) -> DirectorySync {
        DirectorySync {
            newest: watch::Sender::new(None),
            applied: watch::Sender::new(0),
            checks: Arc::default(),
            warned_at: Arc::default(),
            lease_time,
        }
    }

    /// The versions that requests of this process know, for the dispatcher.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<DirectoryVersion>> {
        self.newest.subscribe()
    }

    /// The dispatcher of this process has applied another version, and has saved that in the database.
    pub(crate) fn announce_applied(&self) {
        self.applied.send_modify(|count| *count += 1);
    }

    /// Returns true when every live dispatcher has applied all changes that are committed now, and false if that takes longer
    /// than `time_max` or cannot be found out.
    pub(crate) async fn wait_until_applied(&self, db: &Database, time_max: Duration) -> bool {
        let began = Instant::now();
        let error = match timeout_at(began + time_max, self.wait(db, began)).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => Some(error),
            Err(_) => None,
        };
        if self.is_warning_due(Instant::now()) {
            match error {
                Some(error) => {
                    tracing::warn!(%error, "cannot find out whether dispatchers have applied a change of a subscriber");
                }
                None => tracing::warn!(?time_max, "a dispatcher has not applied a change of a subscriber in time"),
            }
        }
        false
    }

    async fn wait(&self, db: &Database, began: Instant) -> Result<(), Arc<sqlx::Error>> {
        let (mut applied, mut pause) = (self.applied.subscribe(), CHECK_PAUSE);
        let (mut target, mut since) = (None, began);
        loop {
            let (checked_at, check) = self.checks.since(since, || self.check(db)).await?;
            let Applied { newest, oldest_applied } = check.applied;
            // Versions of another incarnation of the database do not count: a failover may have lost the change.
            let wanted = *target.get_or_insert(newest);
            let wanted = if wanted.incarnation == newest.incarnation { wanted } else { newest };
            target = Some(wanted);
            if oldest_applied.is_none_or(|oldest| oldest >= wanted.count) && !check.has_unknown_workers {
                return Ok(());
            }
            self.notify_dispatcher(wanted);
            since = tokio::select! {
                _ = applied.changed() => Instant::now(),
                () = tokio::time::sleep(pause) => {
                    pause = (pause * 2).min(CHECK_PAUSE_MAX);
                    // Whatever another request has found out since then.
                    checked_at + Duration::from_nanos(1)
                }
            };
        }
    }

    async fn check(&self, db: &Database) -> sqlx::Result<Check> {
        let mut db = db.acquire().await?;
        let applied = store::dispatchers::applied(&mut db).await?;
        Ok(Check { applied, has_unknown_workers: has_unknown_workers(&mut db, DISPATCH, self.lease_time).await? })
    }

    /// Whether to log a warning now.
    fn is_warning_due(&self, now: Instant) -> bool {
        let mut warned_at = self.warned_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = warned_at.is_none_or(|at| now.duration_since(at) >= WARNING_PAUSE);
        if is_due {
            *warned_at = Some(now);
        }
        is_due
    }

    fn notify_dispatcher(&self, version: DirectoryVersion) {
        self.newest.send_if_modified(|newest| {
            let is_newer =
                newest.is_none_or(|newest| newest.incarnation != version.incarnation || newest.count < version.count);
            if is_newer {
                *newest = Some(version);
            }
            is_newer
        });
    }
}

/// A check that many tasks need: one of them makes it, the others wait for its result.
#[derive(Debug)]
struct SharedChecks<T> {
    last: tokio::sync::Mutex<Option<LastCheck<T>>>,
}

/// When a check began, and its result.
type LastCheck<T> = (Instant, Result<T, Arc<sqlx::Error>>);

impl<T> Default for SharedChecks<T> {
    fn default() -> SharedChecks<T> {
        SharedChecks { last: tokio::sync::Mutex::default() }
    }
}

impl<T: Clone> SharedChecks<T> {
    /// Returns the result of a check that began at `since` or later, and when it began. Makes the check itself if no other
    /// task has.
    async fn since<F: Future<Output = sqlx::Result<T>>>(
        &self,
        since: Instant,
        check: impl FnOnce() -> F,
    ) -> Result<(Instant, T), Arc<sqlx::Error>> {
        let mut last = self.last.lock().await;
        let (began, result) = match last.take().filter(|(began, _)| *began >= since) {
            Some(last) => last,
            None => (Instant::now(), check().await.map_err(Arc::new)),
        };
        *last = Some((began, result.clone()));
        result.map(|value| (began, value))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test]
    async fn tasks_that_wait_share_their_checks() {
        const TASKS: u64 = 100;
        const ROUNDS: u64 = 3;
        let (checks, count) = (SharedChecks::default(), AtomicU64::new(0));
        let check = || async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            Ok(count.fetch_add(1, Ordering::Relaxed))
        };
        // They begin at different times, and each needs a check that began later than it and than its last one.
        let wait = async |number: u64| {
            tokio::time::sleep(Duration::from_millis(number)).await;
            let mut since = Instant::now();
            for _ in 0..ROUNDS {
                let (began, _) = checks.since(since, check).await.unwrap();
                assert!(began >= since);
                since = began + Duration::from_nanos(1);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        join_all((0..TASKS).map(wait)).await;
        let count = count.into_inner();
        assert!(count <= TASKS * ROUNDS / 3, "{count} checks of {TASKS} tasks in {ROUNDS} rounds");
    }

    #[tokio::test]
    async fn a_process_warns_at_most_once_in_ten_seconds() {
        let (sync, now) = (DirectorySync::new(Duration::from_secs(15)), Instant::now());
        let due_after = |seconds| sync.is_warning_due(now + Duration::from_secs(seconds));
        assert_eq!([0, 1, 9, 10, 11, 30].map(due_after), [true, false, false, true, false, true]);
    }
}
