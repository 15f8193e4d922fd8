//! Pulls that wait for messages of their stream (long poll). A pull that waits has neither a connection nor a transaction.
//!
//! Fan-out wakes the pulls of its own process when it has committed. For messages of another process, one worker polls the
//! batches of fan-out, for all streams together, and only while a pull waits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kit::auth::Principal;
use kit::worker::{Round, Wake};
use sqlx::PgPool;
use tokio::sync::watch;
use uuid::Uuid;

use crate::store::stream_message;

/// Pulls of a process that may wait at a time: of one caller, and in total.
const OF_CALLER_MAX: usize = 100;
const TOTAL_MAX: usize = 1_000;
/// The pause between two polls while pulls wait.
const POLL_PAUSE: Duration = Duration::from_millis(50);

/// The pulls of this process that wait. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct StreamWaiters {
    state: Arc<Mutex<State>>,
    poller: Wake,
}

#[derive(Debug, Default)]
struct State {
    /// The streams that pulls wait for: how many pulls, and what wakes them.
    streams: HashMap<Uuid, (usize, watch::Sender<()>)>,
    waiting: HashMap<Principal, usize>,
    /// The newest batch that the poller has read. None: it has to find out.
    newest: Option<i64>,
    is_closed: bool,
}

/// A pull that may wait for its stream.
pub(crate) struct StreamWaiter {
    waiters: StreamWaiters,
    stream: Uuid,
    woken: watch::Receiver<()>,
    /// Set when it waits: it counts then.
    caller: Option<Principal>,
}

/// Why a pull may not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooManyPulls;

impl StreamWaiters {
    /// What wakes the worker that calls [`StreamWaiters::poll`].
    pub(crate) fn poller(&self) -> Wake {
        self.poller.clone()
    }

    /// Registers a pull before it reads, so that it misses no message that is committed after its read.
    pub(crate) fn register(&self, stream: Uuid) -> StreamWaiter {
        let mut state = self.state();
        let is_first = state.streams.is_empty();
        let (count, sender) = state.streams.entry(stream).or_insert_with(|| (0, watch::Sender::new(())));
        *count += 1;
        let woken = sender.subscribe();
        drop(state);
        if is_first {
            self.poller.wake();
        }
        StreamWaiter { waiters: self.clone(), stream, woken, caller: None }
    }

    /// Wakes the pulls that wait for these streams.
    pub(crate) fn wake(&self, streams: &[Uuid]) {
        if streams.is_empty() {
            return;
        }
        let state = self.state();
        for (_, sender) in streams.iter().filter_map(|stream| state.streams.get(stream)) {
            sender.send_replace(());
        }
    }

    /// Wakes the pulls whose streams have messages that another process has appended.
    pub(crate) async fn poll(&self, db: &PgPool) -> Result<Round, sqlx::Error> {
        let known = {
            let mut state = self.state();
            if state.streams.is_empty() {
                state.newest = None;
                return Ok(Round::Idle);
            }
            state.newest
        };
        let mut db = db.acquire().await?;
        let newest = match known {
            Some(known) => match stream_message::batches_after(&mut db, known).await? {
                Some((newest, streams)) => {
                    self.wake(&streams);
                    newest
                }
                None => known,
            },
            // Nobody knows what was appended before, so all pulls read again.
            None => {
                let newest = stream_message::newest(&mut db).await?;
                self.wake_all();
                newest
            }
        };
        self.state().newest = Some(newest);
        Ok(Round::IdleFor(POLL_PAUSE))
    }

    /// The database may have lost transactions, and then their numbers are assigned again.
    pub(crate) fn reset(&self) {
        self.state().newest = None;
    }

    /// The process stops: no pull waits any longer.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.wake_all();
    }

    fn wake_all(&self) {
        for (_, sender) in self.state().streams.values() {
            sender.send_replace(());
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamWaiter {
    /// From now on, a new message wakes it.
    pub(crate) fn begin_read(&mut self) {
        self.woken.mark_unchanged();
    }

    /// Waits for a message that was appended since [`StreamWaiter::begin_read`], at most `time_max`. Returns false if the
    /// process stops. Fails if too many pulls wait.
    pub(crate) async fn wait(&mut self, caller: Principal, time_max: Duration) -> Result<bool, TooManyPulls> {
        self.count(caller)?;
        // An error would mean that the sender is dropped, but this waiter holds it.
        let _ = tokio::time::timeout(time_max, self.woken.changed()).await;
        Ok(!self.waiters.state().is_closed)
    }

    fn count(&mut self, caller: Principal) -> Result<(), TooManyPulls> {
        if self.caller.is_some() {
            return Ok(());
        }
        let mut state = self.waiters.state();
        let total: usize = state.waiting.values().sum();
        let of_caller = state.waiting.get(&caller).copied().unwrap_or(0);
        if of_caller >= OF_CALLER_MAX || total >= TOTAL_MAX {
            return Err(TooManyPulls);
        }
        *state.waiting.entry(caller).or_default() += 1;
        drop(state);
        self.caller = Some(caller);
        Ok(())
    }
}

impl Drop for StreamWaiter {
    fn drop(&mut self) {
        let mut state = self.waiters.state();
        if let Some((count, _)) = state.streams.get_mut(&self.stream) {
            *count -= 1;
            if *count == 0 {
                state.streams.remove(&self.stream);
            }
        }
        let Some(caller) = self.caller else { return };
        if let Some(count) = state.waiting.get_mut(&caller) {
            *count -= 1;
            if *count == 0 {
                state.waiting.remove(&caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn caller(number: u128) -> Principal {
        Principal::Key(Uuid::from_u128(number))
    }

    #[tokio::test]
    async fn a_wake_between_the_read_and_the_wait_is_not_lost() {
        let (waiters, stream) = (StreamWaiters::default(), Uuid::now_v7());
        let mut waiter = waiters.register(stream);
        waiter.begin_read();
        waiters.wake(&[Uuid::now_v7(), stream]);
        assert_eq!(waiter.wait(caller(1), LONG).await, Ok(true));
        waiter.begin_read();
        let missed = waiter.wait(caller(1), Duration::from_millis(1)).await;
        assert_eq!(missed, Ok(true), "it times out");
        waiters.close();
        assert_eq!(waiter.wait(caller(1), LONG).await, Ok(false));
        drop(waiter);
        let state = waiters.state();
        assert!(state.streams.is_empty() && state.waiting.is_empty());
    }

    #[tokio::test]
    async fn the_pulls_that_wait_are_limited_per_caller_and_in_total() {
        let (waiters, stream, now) = (StreamWaiters::default(), Uuid::now_v7(), Duration::ZERO);
        let mut waiting = Vec::new();
        for number in 0..TOTAL_MAX {
            let mut waiter = waiters.register(stream);
            waiter.wait(caller((number / OF_CALLER_MAX) as u128), now).await.unwrap();
            waiting.push(waiter);
        }
        let mut one_more = waiters.register(stream);
        assert_eq!(one_more.wait(caller(99), now).await, Err(TooManyPulls), "in total");
        waiting.truncate(TOTAL_MAX - 1);
        assert_eq!(one_more.wait(caller(0), now).await, Err(TooManyPulls), "of the caller");
        assert_eq!(one_more.wait(caller(99), now).await, Ok(true));
        assert_eq!(one_more.wait(caller(99), now).await, Ok(true), "it counts once");
    }
}
