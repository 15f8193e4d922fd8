//! The watcher: polls the log once per process, loads new messages, and wakes the readers.
//!
//! An idle log costs one small query per poll, and a busy log two, however many consumers there are: a reader that has
//! kept up finds the new messages in memory, and one that lags reads the log itself.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use runtime::worker::{Round, Wake};
use sqlx::{PgConnection, PgPool};

use super::window::Window;
use crate::database::snapshot::Snapshot;
use crate::database::{Incarnation, Invalidations, SHORT_STEP_TIME_MAX, step};

/// The time between two polls of a busy log.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The time between two polls of an idle log.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A log without new messages for this long is idle.
const IDLE_AFTER: Duration = Duration::from_secs(2);
/// The shortest time between two snapshots. Under load each snapshot then finds more messages, and all readers work in
/// larger batches.
const SNAPSHOT_PAUSE_MIN: Duration = Duration::from_millis(8);

/// An idle log gets a new snapshot after this time, so that positions advance and retention can drop old partitions.
const REFRESH_INTERVAL: Duration = Duration::from_secs(30);

/// The most messages of a window that is held in memory. If a window has more, each reader reads it at its own pace.
const WINDOW_MESSAGES_MAX: u32 = 512;
/// How many windows are held in memory for readers that were busy when the windows were loaded, and their size in
/// bytes.
const WINDOWS_MAX: usize = 16;
const WINDOWS_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How long no window is loaded after one was too large.
const OVERRUN_PAUSE: Duration = Duration::from_secs(1);

/// The newest snapshot and the last windows before it. Each window ends where the next one begins.
#[derive(Clone)]
struct Newest {
    snapshot: Snapshot,
    taken_at: Instant,
    windows: Arc<[Arc<Window>]>,
}

/// The state of the log as this process knows it. Clones share one state.
#[derive(Clone, Default)]
pub(crate) struct Watcher {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    newest: RwLock<Option<Newest>>,
    /// When a window was too large to be held in memory.
    overrun_at: RwLock<Option<Instant>>,
    /// The incarnation of the last snapshot, also while there is none.
    incarnation: RwLock<Option<Incarnation>>,
    invalidations: Invalidations,
    readers: RwLock<Vec<Wake>>,
    /// Wakes the watcher itself.
    wake: Wake,
}

impl Watcher {
    /// Creates a watcher. `wake` is the handle that it waits on between two polls: each commit of a
    /// [`Database`](crate::database::Database) triggers it, and the watcher polls at once. `invalidations` are those of
    /// the same database.
    pub(crate) fn new(wake: Wake, invalidations: Invalidations) -> Watcher {
        Watcher { inner: Arc::new(Inner { wake, invalidations, ..Inner::default() }) }
    }

    /// Returns a handle that is woken with each new snapshot.
    pub(crate) fn subscribe(&self) -> Wake {
        let wake = Wake::default();
        write(&self.inner.readers).push(wake.clone());
        wake
    }

    /// Returns the newest snapshot and the windows before it that are in memory; None before the first snapshot.
    pub(crate) fn newest(&self) -> Option<(Snapshot, Arc<[Arc<Window>]>)> {
        self.load_newest().map(|newest| (newest.snapshot, newest.windows))
    }

    /// Drops the in-memory state, here and in every observer of the invalidations. The database may have restarted or
    /// failed over, and transactions that were seen may be lost: then their ids are assigned again, and everything that
    /// a process remembers can be wrong.
    pub(crate) fn invalidate(&self) {
        *write(&self.inner.newest) = None;
        self.inner.invalidations.invalidate();
    }

    /// Drops the newest snapshot, so that no worker follows it any more. Every worker that loses a connection calls it; the watcher's own may fail
    /// much later, although the database has failed over. Whether transactions were lost is decided by the incarnation of
    /// the next snapshot, so that a lost connection or a short stall invalidates nothing else.
    pub(crate) fn drop_snapshot(&self) {
        *write(&self.inner.newest) = None;
    }

    /// Returns the number of invalidations so far. A reader that sees it change must load its state again.
    pub(crate) fn invalidations(&self) -> u64 {
        self.inner.invalidations.count()
    }

    /// Polls the log once, and takes a new snapshot if anything can have become visible. After an error no worker follows the
    /// last snapshot; the next one finds out whether the database has lost transactions.
    pub(crate) async fn round(&self, db: &PgPool) -> sqlx::Result<Round> {
        let result = step(db, "watcher", SHORT_STEP_TIME_MAX, self.try_round(db)).await;
        if result.is_err() {
            self.drop_snapshot();
        }
        result
    }

    async fn try_round(&self, db: &PgPool) -> sqlx::Result<Round> {
        let since_last = self.load_newest().map_or(SNAPSHOT_PAUSE_MIN, |newest| newest.taken_at.elapsed());
        tokio::time::sleep(SNAPSHOT_PAUSE_MIN.saturating_sub(since_last)).await;
        let mut db = db.acquire().await?;
        let idle_for = match self.load_newest() {
            Some(newest)
                if newest.taken_at.elapsed() < REFRESH_INTERVAL && !newest.snapshot.is_outdated(&mut db).await? =>
            {
                newest.taken_at.elapsed()
            }
            last => {
                self.refresh(&mut db, last).await?;
                Duration::ZERO
            }
        };
        drop(db);
        if idle_for > IDLE_AFTER {
            // A wake-up ends this pause as it ends the worker's own.
            self.inner.wake.wait(IDLE_POLL_INTERVAL.saturating_sub(POLL_INTERVAL)).await;
        }
        Ok(Round::Idle)
    }

    async fn refresh(&self, db: &mut PgConnection, last: Option<Newest>) -> sqlx::Result<()> {
        let snapshot = Snapshot::now(db).await?;
        let known = write(&self.inner.incarnation).replace(snapshot.incarnation);
        if known.is_some_and(|known| known != snapshot.incarnation) {
            tracing::warn!("the database was restarted after a crash, or has failed over; all state is loaded again");
            self.invalidate();
        }
        let windows = match last {
            Some(last) if last.snapshot.incarnation == snapshot.incarnation && self.needs_windows() => {
                let window = self.load_window(db, last.snapshot, &snapshot).await?;
                window.map_or_else(Arc::default, |window| append(&last.windows, window))
            }
            _ => Arc::default(),
        };
        *write(&self.inner.newest) = Some(Newest { snapshot, taken_at: Instant::now(), windows });
        read(&self.inner.readers).iter().for_each(Wake::wake);
        Ok(())
    }

    async fn load_window(&self, db: &mut PgConnection, old: Snapshot, new: &Snapshot) -> sqlx::Result<Option<Window>> {
        let window = Window::load(db, old, new.clone(), WINDOW_MESSAGES_MAX).await?;
        if window.is_none() {
            *write(&self.inner.overrun_at) = Some(Instant::now());
        }
        Ok(window)
    }

    fn needs_windows(&self) -> bool {
        !read(&self.inner.readers).is_empty()
            && read(&self.inner.overrun_at).is_none_or(|overrun_at| overrun_at.elapsed() > OVERRUN_PAUSE)
    }

    fn load_newest(&self) -> Option<Newest> {
        read(&self.inner.newest).clone()
    }

    #[cfg(test)]
    pub(crate) fn assume_newest(&self, snapshot: Snapshot) {
        *write(&self.inner.newest) = Some(Newest { snapshot, taken_at: Instant::now(), windows: Arc::default() });
    }
}

/// Appends a window, and drops the oldest windows that exceed the limits.
fn append(windows: &[Arc<Window>], next: Window) -> Arc<[Arc<Window>]> {
    let mut bytes_left = WINDOWS_BYTES_MAX.saturating_sub(next.bytes);
    let fits = |window: &&Arc<Window>| {
        let left = bytes_left.checked_sub(window.bytes);
        bytes_left = left.unwrap_or(0);
        left.is_some()
    };
    let retained = windows.iter().rev().take(WINDOWS_MAX - 1).take_while(fits).count();
    windows[windows.len() - retained..].iter().cloned().chain([Arc::new(next)]).collect()
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
