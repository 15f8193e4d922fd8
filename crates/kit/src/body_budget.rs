//! The memory that the bodies of requests occupy: bounded for all requests together, and for each caller.
//!
//! The limit on a single body does not bound a process that serves thousands of connections. A request reserves the bytes
//! of its body as they arrive, so a slow upload occupies only what it has sent, and releases them when its response is
//! ready. A request that finds no room is refused at once; none waits. A caller may occupy as much as is free, or one body of
//! the largest size: so one caller gets at most half, and each further one finds room. All API keys of a tenant are one
//! caller, so that a tenant gains nothing by creating more keys.

use std::cell::Cell;
use std::collections::HashMap;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::auth::{Caller, Principal};
use crate::extract::RequestLimits;
use crate::problem::Problem;

const RETRY_AFTER: Duration = Duration::from_secs(1);

tokio::task_local! {
    /// The reservation of the request that this task processes.
    static RESERVATION: Cell<Option<Reservation>>;
}

/// Processes a request. The reservation of its body is released when the future completes or is dropped.
pub(crate) fn scope<F: Future>(responding: F) -> impl Future<Output = F::Output> {
    RESERVATION.scope(Cell::new(None), responding)
}

/// The budget of one process.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    bytes_max: usize,
    body_bytes_max: usize,
    hasher: RandomState,
    used: Mutex<Used>,
}

/// The reserved bytes, in total and by caller.
#[derive(Debug, Default)]
struct Used {
    total: usize,
    by_caller: HashMap<CallerHash, usize>,
}

/// A hash instead of the name of a tenant, which would be one more allocation for each request. Two callers with the same
/// hash share one part of the budget.
type CallerHash = u64;

impl BodyBudget {
    pub(crate) fn new(limits: &RequestLimits) -> BodyBudget {
        let bytes_max = limits.body_bytes_total_max.max(limits.body_bytes_max);
        BodyBudget {
            bytes_max,
            body_bytes_max: limits.body_bytes_max,
            hasher: RandomState::new(),
            used: Mutex::default(),
        }
    }

    /// Starts the reservation of a body. Fails with 503 if a body of the announced length would not fit now.
    pub(crate) fn start(
        self: &Arc<BodyBudget>,
        caller: Option<&Caller>,
        announced: usize,
    ) -> Result<Reservation, Problem> {
        let caller = self.hasher.hash_one(caller.map(|caller| match caller.principal {
            Principal::User(_) => (Some(caller.principal), caller.tenant.as_str()),
            Principal::Key(_) | Principal::Portal(_) => (None, caller.tenant.as_str()),
        }));
        match self.fits(&self.used(), caller, announced.max(1)) {
            true => Ok(Reservation { budget: Arc::clone(self), caller, bytes: 0 }),
            false => Err(budget_exhausted()),
        }
    }

    fn fits(&self, used: &Used, caller: CallerHash, bytes: usize) -> bool {
        let of_caller = used.by_caller.get(&caller).copied().unwrap_or(0).saturating_add(bytes);
        let free = self.bytes_max.saturating_sub(used.total);
        bytes <= free && of_caller <= free.max(self.body_bytes_max)
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        // A panic while the lock is held leaves no partial change, so a poisoned lock is usable.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bytes of one body. Dropping it releases them.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<BodyBudget>,
    caller: CallerHash,
    bytes: usize,
}

impl Reservation {
    /// Adds bytes that have arrived. Fails with 503 if there is no room for them.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Problem> {
        let mut used = self.budget.used();
        if !self.budget.fits(&used, self.caller, bytes) {
            return Err(budget_exhausted());
        }
        used.total += bytes;
        *used.by_caller.entry(self.caller).or_default() += bytes;
        self.bytes += bytes;
        Ok(())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Releases the bytes when the response is ready: until then the handler uses the parsed body. Without a [`scope`]
    /// they are released at once.
    pub(crate) fn release_after_response(self) {
        let _ = RESERVATION.try_with(|slot| slot.set(Some(self)));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut used = self.budget.used();
        used.total -= self.bytes;
        if let Some(of_caller) = used.by_caller.get_mut(&self.caller) {
            *of_caller -= self.bytes;
            // Otherwise the map would grow with every caller.
            if *of_caller == 0 {
                used.by_caller.remove(&self.caller);
            }
        }
    }
}

fn budget_exhausted() -> Problem {
    let detail = "other requests occupy the memory for request bodies (`body_bytes_total_max`), of which one user or \
                  tenant may use half; send fewer requests at the same time, or send this one again later";
    Problem::overloaded(detail, RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Tenant;
    use uuid::Uuid;

    fn budget(bytes_total_max: usize) -> Arc<BodyBudget> {
        let limits =
            RequestLimits { body_bytes_max: 10, body_bytes_total_max: bytes_total_max, ..RequestLimits::default() };
        Arc::new(BodyBudget::new(&limits))
    }

    fn user() -> Caller {
        Caller::new(Principal::User(Uuid::new_v4()), Tenant::main(), None)
    }

    fn key(tenant: &str) -> Caller {
        Caller::new(Principal::Key(Uuid::new_v4()), tenant.parse().unwrap(), None)
    }

    #[test]
    fn a_caller_gets_half_and_all_callers_together_get_the_total() {
        let (budget, callers) = (budget(40), [user(), user(), key("acme")]);
        let mut reservations = callers.each_ref().map(|caller| budget.start(Some(caller), 5).unwrap());
        reservations[0].grow(20).unwrap();
        assert_eq!(reservations[0].grow(1).unwrap_err().code(), "overloaded", "more than half");
        assert_eq!(budget.start(Some(&callers[0]), 0).unwrap_err().status(), 503, "refused before anything is read");
        reservations[1].grow(19).unwrap();
        assert!(reservations[2].grow(2).is_err(), "more than the total");
        reservations[2].grow(1).unwrap();
        assert_eq!(reservations[2].bytes(), 1);
        drop(reservations);
        let used = budget.used();
        assert_eq!((used.total, used.by_caller.len()), (0, 0), "everything is released");
    }

    #[test]
    fn each_further_caller_gets_half_of_what_is_left_and_at_least_one_body() {
        let budget = budget(80);
        // Byte by byte, as bodies arrive.
        let mut reservations: Vec<Reservation> = Vec::new();
        let used: Vec<usize> = (0..5)
            .filter_map(|_| budget.start(Some(&user()), 1).ok())
            .map(|mut reservation| {
                while reservation.grow(1).is_ok() {}
                reservations.push(reservation);
                reservations.last().map_or(0, Reservation::bytes)
            })
            .collect();
        assert_eq!(used, [40, 20, 10, 10]);
    }

    #[test]
    fn the_keys_of_a_tenant_share_one_part() {
        let budget = budget(40);
        budget.start(Some(&key("acme")), 20).unwrap().grow(20).unwrap();
        let mut first = budget.start(Some(&key("acme")), 20).unwrap();
        first.grow(20).unwrap();
        assert!(budget.start(Some(&key("acme")), 1).is_err());
        assert!(budget.start(Some(&key("rival")), 1).is_ok());
        assert!(budget.start(None, 1).is_ok());
    }

    #[test]
    fn the_largest_body_fits_even_into_a_small_budget() {
        let budget = budget(10);
        budget.start(Some(&user()), 10).unwrap().grow(10).unwrap();
        assert!(budget.start(Some(&user()), 11).is_err());
    }

    #[tokio::test]
    async fn a_reservation_lasts_until_the_response() {
        let budget = budget(40);
        scope(async {
            let mut reservation = budget.start(Some(&user()), 1).unwrap();
            reservation.grow(7).unwrap();
            reservation.release_after_response();
            assert_eq!(budget.used().total, 7);
        })
        .await;
        assert_eq!(budget.used().total, 0);
    }
}
