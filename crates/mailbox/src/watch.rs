//! One watcher per process looks how far the log has come, reads what is new, and wakes the readers. So a quiet log costs
//! one small query a tick, and one with traffic two, however many consumers there are: who has kept up finds what is new in
//! memory, who has not reads for itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use kit::worker::{Round, Wake};
use sqlx::{PgConnection, PgPool};

use crate::log::{self, Message};
use crate::moment::Moment;

/// How often it looks while there is traffic, and after a while without.
pub const PAUSE: Duration = Duration::from_millis(20);
const IDLE_PAUSE: Duration = Duration::from_millis(100);
const IDLE_AFTER: Duration = Duration::from_secs(2);
/// After it has found something it waits so long: under load it finds more each time, and all behind it work in larger batches.
const GATHER: Duration = Duration::from_millis(8);

/// Also a log in which nothing happens has new moments: positions move on with them, and old partitions can go.
const REFRESH: Duration = Duration::from_secs(30);

/// What is read ahead at a time; a log that brings more is read by each reader at its own pace.
const AHEAD: u32 = 512;
/// So many windows, and so much of them together, are kept for who was at work when they came.
const WINDOWS_MAX: usize = 16;
const WINDOWS_BYTES_MAX: usize = 16 * 1024 * 1024;
/// After so much at once, this long not.
const AHEAD_PAUSE: Duration = Duration::from_secs(1);

/// What became visible between two moments that follow each other.
pub(crate) struct Ahead {
    pub(crate) old: Moment,
    pub(crate) new: Moment,
    pub(crate) messages: Vec<Message>,
    bytes: usize,
}

/// The newest moment, and the last windows before it, each where the one before ends.
#[derive(Clone)]
struct Seen {
    moment: Moment,
    at: Instant,
    ahead: Arc<[Arc<Ahead>]>,
}

/// Shared by what watches, what reads and what posts.
#[derive(Clone, Default)]
pub struct Watcher {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    newest: RwLock<Option<Seen>>,
    /// When there was too much to read ahead.
    overrun_at: RwLock<Option<Instant>>,
    doubts: AtomicU64,
    readers: RwLock<Vec<Wake>>,
    /// Wakes the watcher itself.
    wake: Wake,
}

impl Watcher {
    /// Something was posted: look now.
    pub fn nudge(&self) {
        self.inner.wake.wake();
    }

    /// What [`Watcher::nudge`] wakes.
    pub fn wake(&self) -> Wake {
        self.inner.wake.clone()
    }

    /// To be woken with each new moment.
    pub fn subscribe(&self) -> Wake {
        let wake = Wake::default();
        write(&self.inner.readers).push(wake.clone());
        wake
    }

    /// The newest moment, once there is one, and what came before it, as far as it is at hand.
    pub(crate) fn newest(&self) -> Option<(Moment, Arc<[Arc<Ahead>]>)> {
        self.look().map(|seen| (seen.moment, seen.ahead))
    }

    /// The database may have been restarted, and what was seen may not have been kept: transaction ids are given out again
    /// then. What is in memory is not to be trusted any more.
    pub fn doubt(&self) {
        *write(&self.inner.newest) = None;
        self.inner.doubts.fetch_add(1, Ordering::SeqCst);
    }

    /// Grows with each doubt.
    pub fn doubts(&self) -> u64 {
        self.inner.doubts.load(Ordering::SeqCst)
    }

    /// Takes a new moment if anything has happened.
    pub async fn round(&self, db: &PgPool) -> sqlx::Result<Round> {
        let outcome = self.try_round(db).await;
        if outcome.is_err() {
            self.doubt();
        }
        outcome
    }

    async fn try_round(&self, db: &PgPool) -> sqlx::Result<Round> {
        let found_before = self.look().map_or(GATHER, |seen| seen.at.elapsed());
        tokio::time::sleep(GATHER.saturating_sub(found_before)).await;
        let mut db = db.acquire().await?;
        let quiet_for = match self.look() {
            Some(seen) if seen.at.elapsed() < REFRESH && !seen.moment.has_passed(&mut db).await? => seen.at.elapsed(),
            last => {
                self.take(&mut db, last).await?;
                Duration::ZERO
            }
        };
        drop(db);
        if quiet_for > IDLE_AFTER {
            // A nudge ends the worker's own pause, and this one, too.
            self.inner.wake.waited(IDLE_PAUSE.saturating_sub(PAUSE)).await;
        }
        Ok(Round::Idle)
    }

    async fn take(&self, db: &mut PgConnection, last: Option<Seen>) -> sqlx::Result<()> {
        let moment = Moment::now(db).await?;
        let ahead = match last {
            Some(last) if self.reads_ahead() => {
                let window = self.read_ahead(db, last.moment, &moment).await?;
                window.map_or_else(Arc::default, |window| continued(&last.ahead, window))
            }
            _ => Arc::default(),
        };
        *write(&self.inner.newest) = Some(Seen { moment, at: Instant::now(), ahead });
        read(&self.inner.readers).iter().for_each(Wake::wake);
        Ok(())
    }

    async fn read_ahead(&self, db: &mut PgConnection, old: Moment, new: &Moment) -> sqlx::Result<Option<Ahead>> {
        let Some(messages) = log::between(db, &old, new, AHEAD).await? else {
            *write(&self.inner.overrun_at) = Some(Instant::now());
            return Ok(None);
        };
        let bytes = messages.iter().map(Message::bytes).sum();
        Ok(Some(Ahead { old, new: new.clone(), messages, bytes }))
    }

    fn reads_ahead(&self) -> bool {
        !read(&self.inner.readers).is_empty()
            && read(&self.inner.overrun_at).is_none_or(|overrun_at| overrun_at.elapsed() > AHEAD_PAUSE)
    }

    fn look(&self) -> Option<Seen> {
        read(&self.inner.newest).clone()
    }
}

/// The last windows, with one more behind them.
fn continued(windows: &[Arc<Ahead>], next: Ahead) -> Arc<[Arc<Ahead>]> {
    let mut room = WINDOWS_BYTES_MAX.saturating_sub(next.bytes);
    let fits = |window: &&Arc<Ahead>| {
        let left = room.checked_sub(window.bytes);
        room = left.unwrap_or(0);
        left.is_some()
    };
    let kept = windows.iter().rev().take(WINDOWS_MAX - 1).take_while(fits).count();
    windows[windows.len() - kept..].iter().cloned().chain([Arc::new(next)]).collect()
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
