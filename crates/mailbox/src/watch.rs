//! One watcher per process looks how far the log has come, and wakes the readers.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kit::worker::{Round, Wake};
use sqlx::{PgConnection, PgPool};

use crate::moment::Moment;

/// How often it looks while there is traffic, and after a while without.
pub const PAUSE: Duration = Duration::from_millis(20);
const IDLE_PAUSE: Duration = Duration::from_millis(100);
const IDLE_AFTER: Duration = Duration::from_secs(2);

/// Also a log in which nothing happens has new moments: positions move on with them, and old partitions can go.
const REFRESH: Duration = Duration::from_secs(30);

/// Shared by what watches, what reads and what posts.
#[derive(Clone, Default)]
pub struct Watcher {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    newest: RwLock<Option<(Moment, Instant)>>,
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
        self.inner.readers.write().unwrap_or_else(PoisonError::into_inner).push(wake.clone());
        wake
    }

    /// The newest moment, once there is one.
    pub fn newest(&self) -> Option<Moment> {
        self.look().map(|(moment, _)| moment)
    }

    /// Takes a new moment if anything has happened.
    pub async fn round(&self, db: &PgPool) -> sqlx::Result<Round> {
        let mut db = db.acquire().await?;
        let quiet_for = match self.look() {
            Some((newest, taken)) if taken.elapsed() < REFRESH && !newest.has_passed(&mut db).await? => taken.elapsed(),
            _ => {
                self.take(&mut db).await?;
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

    async fn take(&self, db: &mut PgConnection) -> sqlx::Result<()> {
        let moment = Moment::now(db).await?;
        *self.inner.newest.write().unwrap_or_else(PoisonError::into_inner) = Some((moment, Instant::now()));
        self.inner.readers.read().unwrap_or_else(PoisonError::into_inner).iter().for_each(Wake::wake);
        Ok(())
    }

    fn look(&self) -> Option<(Moment, Instant)> {
        self.inner.newest.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
