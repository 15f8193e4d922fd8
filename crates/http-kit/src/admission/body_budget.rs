//! The memory that the bodies of requests occupy: bounded for all requests together, and for each caller.
//!
//! The limit on a single body does not bound a process that serves thousands of connections. A request reserves the bytes
//! of its body as they arrive, so a slow upload occupies only what it has sent, and releases them when its response is
//! ready. The bytes are a [`FairBudget`], of which each caller may have one body of the largest size.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::admission::caller_id::CallerId;
use crate::admission::fair_budget::{FairBudget, FairLimits, Reservation};
use crate::problem::Problem;

const RETRY_AFTER: Duration = Duration::from_secs(1);

tokio::task_local! {
    /// The reservation of the request that this task processes.
    static RESERVATION: Cell<Option<BodyReservation>>;
}

/// Processes a request. The reservation of its body is released when the future completes or is dropped.
pub(crate) fn scope<F: Future>(responding: F) -> impl Future<Output = F::Output> {
    RESERVATION.scope(Cell::new(None), responding)
}

/// The budget of one process.
#[derive(Debug, Clone)]
pub(crate) struct BodyBudget(Arc<FairBudget>);

impl BodyBudget {
    /// `bytes_max` is the largest body, which always fits into the budget.
    pub(crate) fn new(bytes_max: usize, bytes_total_max: usize) -> BodyBudget {
        let total = bytes_total_max.max(bytes_max);
        BodyBudget(FairBudget::new(FairLimits { total, caller_min: bytes_max, caller_max: usize::MAX }))
    }

    /// Starts the reservation of a body. Fails with 503 if a body of the announced length would not fit now.
    pub(crate) fn start(&self, caller: CallerId, announced: usize) -> Result<BodyReservation, Problem> {
        if !self.0.would_fit(caller, announced.max(1)) {
            return Err(budget_exhausted());
        }
        self.0.reserve(caller, 0).map(BodyReservation).ok_or_else(budget_exhausted)
    }
}

/// The bytes of one body. Dropping it releases them.
#[derive(Debug)]
pub(crate) struct BodyReservation(Reservation);

impl BodyReservation {
    /// Adds bytes that have arrived. Fails with 503 if there is no room for them.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Problem> {
        if self.0.grow(bytes) { Ok(()) } else { Err(budget_exhausted()) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.units()
    }

    /// Releases the bytes when the response is ready: until then the handler uses the parsed body. Without a [`scope`]
    /// they are released at once.
    pub(crate) fn release_after_response(self) {
        let _ = RESERVATION.try_with(|slot| slot.set(Some(self)));
    }
}

fn budget_exhausted() -> Problem {
    let detail = "other requests occupy the memory for request bodies (`body_bytes_total_max`), of which one user, \
                  tenant or network may use half; send fewer requests at the same time, or send this one again later";
    Problem::overloaded(detail, RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(bytes_total_max: usize) -> BodyBudget {
        BodyBudget::new(10, bytes_total_max)
    }

    #[test]
    fn a_body_that_does_not_fit_is_refused_before_anything_is_read_and_as_it_arrives() {
        let (budget, caller) = (budget(40), CallerId::of_network(None));
        let mut reservation = budget.start(caller, 20).unwrap();
        reservation.grow(20).unwrap();
        assert_eq!(reservation.grow(1).unwrap_err().code(), "overloaded", "more than half");
        assert_eq!(budget.start(caller, 0).unwrap_err().status(), 503, "refused before anything is read");
    }

    #[test]
    fn the_largest_body_fits_even_into_a_small_budget() {
        let (budget, caller) = (budget(5), CallerId::of_network(None));
        budget.start(caller, 10).unwrap().grow(10).unwrap();
        assert!(budget.start(caller, 11).is_err());
    }

    #[tokio::test]
    async fn a_reservation_lasts_until_the_response() {
        let (budget, caller) = (budget(40), CallerId::of_network(None));
        scope(async {
            let mut reservation = budget.start(caller, 1).unwrap();
            reservation.grow(20).unwrap();
            reservation.release_after_response();
            assert!(budget.start(caller, 1).is_err());
        })
        .await;
        assert!(budget.start(caller, 20).is_ok());
    }
}
