//! Pulls that wait for messages of their stream (long poll). A pull that waits has neither a connection nor a transaction.
//!
//! Fan-out wakes the pulls of its process when it has committed. For messages of another process, one worker polls the
//! batches of fan-out, for all streams together, and only while a pull waits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_kit::admission::caller_id::CallerId;
use http_kit::admission::fair_budget::{FairBudget, FairLimits, Reservation};
use http_kit::auth::Caller;
use runtime::worker::{Round, Wake};
use sqlx::PgPool;
use tokio::sync::watch;
use uuid::Uuid;

use crate::streams::store;

/// Pulls of a process that may wait at a time: of one key, portal token or user, and in total. A tenant with all its keys and portal
/// tokens may have half of what is free, and a few in any case.
const OF_PRINCIPAL_MAX: usize = 100;
const TOTAL_MAX: usize = 1_000;
const OF_TENANT_MIN: usize = 10;
/// The pause between two polls while pulls wait.
const POLL_PAUSE: Duration = Duration::from_millis(50);

/// The pulls of this process that wait. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct StreamWaiters {
    state: Arc<Mutex<State>>,
    poller: Wake,
    limits: WaitLimits,
}

#[derive(Debug, Clone)]
struct WaitLimits {
    of_tenant: Arc<FairBudget>,
    of_principal: Arc<FairBudget>,
}

#[derive(Debug, Default)]
struct State {
    /// The streams that pulls wait for: how many pulls, and what wakes them.
    streams: HashMap<Uuid, (usize, watch::Sender<()>)>,
    /// The newest batch that the poller has read. None: it has to find out.
    newest: Option<i64>,
    is_closed: bool,
}

/// A pull that may wait for its stream.
pub(crate) struct StreamWaiter {
    waiters: StreamWaiters,
    stream: Uuid,
    woken: watch::Receiver<()>,
    /// Taken when it waits for the first time.
    places: Option<[Reservation; 2]>,
}

/// Why a pull may not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooManyPulls;

impl Default for StreamWaiters {
    fn default() -> StreamWaiters {
        let limits = FairLimits { total: TOTAL_MAX, caller_min: OF_TENANT_MIN, caller_max: TOTAL_MAX };
        let of_tenant = FairBudget::new(limits);
        let of_principal =
            FairBudget::new(FairLimits { caller_min: OF_PRINCIPAL_MAX, caller_max: OF_PRINCIPAL_MAX, ..limits });
        StreamWaiters { state: Arc::default(), poller: Wake::default(), limits: WaitLimits { of_tenant, of_principal } }
    }
}

impl WaitLimits {
    /// Takes a place; None if the caller or its tenant has as many as it may have.
    fn reserve(&self, caller: &Caller) -> Option<[Reservation; 2]> {
        let of_principal = self.of_principal.reserve(CallerId::of_principal(caller.principal), 1)?;
        Some([of_principal, self.of_tenant.reserve(CallerId::of_tenant(&caller.tenant), 1)?])
    }
}

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
        StreamWaiter { waiters: self.clone(), stream, woken, places: None }
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
            Some(known) => match store::messages::batches_after(&mut db, known).await? {
                Some((newest, streams)) => {
                    self.wake(&streams);
                    newest
                }
                None => known,
            },
            // It is not known what was appended before, so all pulls read again.
            None => {
                let newest = store::messages::newest(&mut db).await?;
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
    pub(crate) async fn wait(&mut self, caller: &Caller, time_max: Duration) -> Result<bool, TooManyPulls> {
        if self.places.is_none() {
            self.places = Some(self.waiters.limits.reserve(caller).ok_or(TooManyPulls)?);
        }
        // It may have been registered after the others were woken.
        if self.waiters.state().is_closed {
            return Ok(false);
        }
        // An error would mean that the sender is dropped, but this waiter holds it.
        let _ = tokio::time::timeout(time_max, self.woken.changed()).await;
        Ok(!self.waiters.state().is_closed)
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
    }
}

#[cfg(test)]
mod tests {
    use http_kit::auth::Principal;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A portal token of a tenant.
    fn caller(tenant: &str, number: u128) -> Caller {
        Caller::new(Principal::Portal(Uuid::from_u128(number)), tenant.parse().unwrap(), None)
    }

    #[tokio::test]
    async fn a_wake_between_the_read_and_the_wait_is_not_lost() {
        let (waiters, stream, acme) = (StreamWaiters::default(), Uuid::now_v7(), caller("acme", 1));
        let mut waiter = waiters.register(stream);
        waiter.begin_read();
        waiters.wake(&[Uuid::now_v7(), stream]);
        assert_eq!(waiter.wait(&acme, LONG).await, Ok(true));
        waiter.begin_read();
        let missed = waiter.wait(&acme, Duration::from_millis(1)).await;
        assert_eq!(missed, Ok(true), "it times out");
        waiters.close();
        assert_eq!(waiter.wait(&acme, LONG).await, Ok(false));
        assert_eq!(waiters.register(stream).wait(&acme, LONG).await, Ok(false), "it comes too late");
        drop(waiter);
        let state = waiters.state();
        assert!(state.streams.is_empty());
    }

    /// Waits once for each caller. Returns the pulls that have a place.
    async fn waiting(waiters: &StreamWaiters, callers: impl Iterator<Item = Caller>) -> Vec<StreamWaiter> {
        let mut waiting = Vec::new();
        for caller in callers {
            let mut waiter = waiters.register(Uuid::nil());
            if waiter.wait(&caller, Duration::ZERO).await.is_ok() {
                waiting.push(waiter);
            }
        }
        waiting
    }

    #[tokio::test]
    async fn a_tenant_with_many_portal_tokens_occupies_half_and_other_tenants_wait_as_well() {
        let waiters = StreamWaiters::default();
        let attack = waiting(&waiters, (0..1_100).map(|pull| caller("acme", pull / 100))).await;
        assert_eq!(attack.len(), TOTAL_MAX / 2);
        let others = waiting(&waiters, (0..20).map(|n| caller(&format!("t{n}"), 100 + n))).await;
        assert_eq!(others.len(), 20);
        drop(attack);
        assert_eq!(
            waiting(&waiters, (0..100).map(|_| caller("acme", 1))).await.len(),
            100,
            "the places are free again"
        );
    }

    #[tokio::test]
    async fn the_pulls_that_wait_are_limited_per_caller_and_each_counts_once() {
        let waiters = StreamWaiters::default();
        let mut waiting = waiting(&waiters, (0..150).map(|_| caller("acme", 1))).await;
        assert_eq!(waiting.len(), OF_PRINCIPAL_MAX);
        assert_eq!(waiting[0].wait(&caller("acme", 1), Duration::ZERO).await, Ok(true), "again");
        let mut other = waiters.register(Uuid::nil());
        assert_eq!(other.wait(&caller("acme", 1), Duration::ZERO).await, Err(TooManyPulls));
        assert_eq!(other.wait(&caller("acme", 2), Duration::ZERO).await, Ok(true));
    }
}
