//! Permits for which callers wait, such as those of the connections of a pool.
//!
//! A caller may have at most as many permits as are free afterwards, as of a [`FairBudget`](crate::admission::fair_budget::FairBudget): one
//! busy caller gets half of them, two get a third each, and so on. So a further caller finds one free, whatever the others do.
//! The requests of one caller get permits in the order in which they came, and callers take turns. A caller without a
//! permit never waits for one with several: it gets the next permit that is released.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::admission::caller_id::CallerId;

/// The permits of one process.
#[derive(Debug)]
pub(crate) struct FairPermits {
    total: usize,
    /// The permits that a caller may have even if more are free.
    caller_max: usize,
    state: Mutex<State>,
}

/// A permit. Dropping it gives it to the next request.
#[derive(Debug)]
pub(crate) struct FairPermit {
    permits: Arc<FairPermits>,
    /// None: work that no request triggered.
    caller: Option<CallerId>,
}

#[derive(Debug, Default)]
struct State {
    used: usize,
    callers: HashMap<Option<CallerId>, CallerState>,
    /// The callers that wait, in the order of their turns.
    turns: VecDeque<Option<CallerId>>,
}

#[derive(Debug, Default)]
struct CallerState {
    used: usize,
    waiting: VecDeque<oneshot::Sender<FairPermit>>,
    /// Whether the caller is in [`State::turns`].
    has_turn: bool,
}

impl FairPermits {
    pub(crate) fn new(total: usize, caller_max: usize) -> Arc<FairPermits> {
        Arc::new(FairPermits { total, caller_max, state: Mutex::default() })
    }

    /// Waits for a permit. Dropping the future ends the wait.
    pub(crate) async fn acquire(self: &Arc<FairPermits>, caller: Option<CallerId>) -> FairPermit {
        loop {
            let receiver = match self.acquire_or_wait(caller) {
                Ok(permit) => return permit,
                Err(receiver) => receiver,
            };
            // The sender is dropped only together with its permits, which this future keeps alive.
            if let Ok(permit) = receiver.await {
                return permit;
            }
        }
    }

    fn acquire_or_wait(
        self: &Arc<FairPermits>,
        caller: Option<CallerId>,
    ) -> Result<FairPermit, oneshot::Receiver<FairPermit>> {
        let mut state = self.state();
        let used = state.used;
        let of_caller = state.callers.entry(caller).or_default();
        if of_caller.waiting.is_empty() && self.fits(used, of_caller.used) {
            of_caller.used += 1;
            state.used += 1;
            return Ok(FairPermit { permits: Arc::clone(self), caller });
        }
        let (sender, receiver) = oneshot::channel();
        // Before the queue grows, so that the cost per request is constant.
        if of_caller.waiting.len() == of_caller.waiting.capacity() {
            of_caller.waiting.retain(|waiting| !waiting.is_closed());
        }
        of_caller.waiting.push_back(sender);
        if !of_caller.has_turn {
            of_caller.has_turn = true;
            state.turns.push_back(caller);
        }
        Err(receiver)
    }

    /// Returns whether a caller with this number of permits may have another one.
    fn fits(&self, used: usize, used_by_caller: usize) -> bool {
        let Some(free_afterwards) = self.total.checked_sub(used + 1) else { return false };
        used_by_caller < free_afterwards.max(1).min(self.caller_max)
    }

    fn release(self: &Arc<FairPermits>, caller: Option<CallerId>) {
        let mut state = self.state();
        state.used -= 1;
        if let Some(of_caller) = state.callers.get_mut(&caller) {
            of_caller.used -= 1;
            state.remove_unused(caller);
        }
        let granted = self.grant(&mut state);
        drop(state);
        for (caller, sender) in granted {
            // A request that has stopped waiting returns its permit, which is then released here again.
            drop(sender.send(FairPermit { permits: Arc::clone(self), caller }));
        }
    }

    /// Gives the free permits to the callers that wait and may have them.
    fn grant(&self, state: &mut State) -> Vec<(Option<CallerId>, oneshot::Sender<FairPermit>)> {
        let mut granted = Vec::new();
        // Every caller that is passed over has a permit, so there are at most as many of them as permits.
        let mut passed_over = 0;
        while state.used < self.total && passed_over < state.turns.len() {
            let Some(caller) = state.turns.pop_front() else { break };
            let used = state.used;
            let Some(of_caller) = state.callers.get_mut(&caller) else { continue };
            while of_caller.waiting.front().is_some_and(oneshot::Sender::is_closed) {
                of_caller.waiting.pop_front();
            }
            if of_caller.waiting.is_empty() {
                of_caller.has_turn = false;
                state.remove_unused(caller);
                continue;
            }
            if !self.fits(used, of_caller.used) {
                state.turns.push_back(caller);
                passed_over += 1;
                continue;
            }
            if let Some(sender) = of_caller.waiting.pop_front() {
                of_caller.used += 1;
                state.used += 1;
                granted.push((caller, sender));
            }
            state.turns.push_back(caller);
        }
        granted
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves no partial change, so a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Removes a caller without permits and requests. Otherwise the map would grow with every caller.
    fn remove_unused(&mut self, caller: Option<CallerId>) {
        if self.callers.get(&caller).is_some_and(|one| one.used == 0 && !one.has_turn) {
            self.callers.remove(&caller);
        }
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        self.permits.release(self.caller);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use super::*;

    fn callers(count: u8) -> Vec<Option<CallerId>> {
        let address = |last: u8| crate::client_address::ClientAddress([192, 0, 2, last].into());
        (0..count).map(|last| Some(CallerId::of_network(Some(address(last))))).collect()
    }

    /// Acquires without waiting.
    fn try_acquire(permits: &Arc<FairPermits>, caller: Option<CallerId>) -> Option<FairPermit> {
        match pin!(permits.acquire(caller)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(permit) => Some(permit),
            Poll::Pending => None,
        }
    }

    fn acquire_all(permits: &Arc<FairPermits>, caller: Option<CallerId>) -> Vec<FairPermit> {
        std::iter::from_fn(|| try_acquire(permits, caller)).collect()
    }

    #[test]
    fn one_caller_gets_half_and_each_further_one_finds_a_permit() {
        let (permits, callers) = (FairPermits::new(20, usize::MAX), callers(7));
        let acquired: Vec<Vec<FairPermit>> = callers.iter().map(|caller| acquire_all(&permits, *caller)).collect();
        assert_eq!(acquired.iter().map(Vec::len).collect::<Vec<_>>(), [10, 5, 2, 1, 1, 1, 0]);
        drop(acquired);
        assert!(permits.state().callers.is_empty() && permits.state().used == 0, "everything is released");
        assert_eq!(acquire_all(&FairPermits::new(20, 3), callers[0]).len(), 3, "no more than its maximum");
    }

    #[tokio::test]
    async fn busy_callers_end_with_equal_shares_and_one_is_free() {
        let (permits, callers) = (FairPermits::new(20, usize::MAX), callers(3));
        let mut tasks = tokio::task::JoinSet::new();
        for caller in [callers[0], callers[1]] {
            for _ in 0..50 {
                let permits = Arc::clone(&permits);
                tasks.spawn(async move {
                    for _ in 0..20 {
                        let _permit = permits.acquire(caller).await;
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                });
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        let used = |caller| permits.state().callers.get(&caller).map_or(0, |one| one.used);
        let shares = [used(callers[0]), used(callers[1])];
        assert!(shares.iter().all(|used| (5..=8).contains(used)), "{shares:?}");
        assert!(try_acquire(&permits, callers[2]).is_some());
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        assert!(permits.state().callers.is_empty() && permits.state().turns.is_empty());
    }

    #[tokio::test]
    async fn a_caller_without_a_permit_gets_the_next_one_before_a_long_queue() {
        let (permits, callers) = (FairPermits::new(1, usize::MAX), callers(2));
        let first = permits.acquire(callers[0]).await;
        let wait = |caller| {
            let permits = Arc::clone(&permits);
            tokio::spawn(async move { drop(permits.acquire(caller).await) })
        };
        let queue: Vec<_> = (0..100).map(|_| wait(callers[0])).collect();
        tokio::task::yield_now().await;
        let abandoned = wait(callers[1]);
        tokio::task::yield_now().await;
        abandoned.abort();
        let _ = abandoned.await;
        let held = {
            let permits = Arc::clone(&permits);
            tokio::spawn(async move { permits.acquire(callers[1]).await })
        };
        tokio::task::yield_now().await;
        drop(first);
        let held = held.await.unwrap();
        assert!(queue.iter().filter(|one| !one.is_finished()).count() >= 99, "at most one of the queue was before it");
        drop(held);
        for waiting in queue {
            waiting.await.unwrap();
        }
        assert!(permits.state().callers.is_empty() && permits.state().turns.is_empty());
    }
}
