//! Divides something limited, such as the memory for bodies or the places of requests that wait, among all callers of a process.
//!
//! A request never waits for room: it is refused at once. A caller may have at most as much as is free afterwards. So the first
//! caller gets at most half, the second one half of the rest, and each further one still finds room. A minimum for each caller
//! keeps the last ones able to work, as long as there is room at all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::admission::caller_id::CallerId;

/// How much there is, in units such as bytes or places.
#[derive(Debug, Clone, Copy)]
pub struct FairLimits {
    pub total: usize,
    /// What a caller may have even if less than that is left for each.
    pub caller_min: usize,
    /// What a caller may have even if more than that is free.
    pub caller_max: usize,
}

/// The budget of one process.
#[derive(Debug)]
pub struct FairBudget {
    limits: FairLimits,
    used: Mutex<Used>,
}

/// The reserved units, in total and by caller.
#[derive(Debug, Default)]
struct Used {
    total: usize,
    by_caller: HashMap<CallerId, usize>,
}

impl FairBudget {
    pub fn new(limits: FairLimits) -> Arc<FairBudget> {
        Arc::new(FairBudget { limits, used: Mutex::default() })
    }

    /// Returns whether a reservation of this size would find room now.
    pub fn would_fit(&self, caller: CallerId, units: usize) -> bool {
        self.fits(&self.used(), caller, units)
    }

    /// Reserves units; None if there is no room.
    pub fn reserve(self: &Arc<FairBudget>, caller: CallerId, units: usize) -> Option<Reservation> {
        let mut reservation = Reservation { budget: Arc::clone(self), caller, units: 0 };
        reservation.grow(units).then_some(reservation)
    }

    fn fits(&self, used: &Used, caller: CallerId, units: usize) -> bool {
        let of_caller = used.by_caller.get(&caller).copied().unwrap_or(0).saturating_add(units);
        let FairLimits { total, caller_min, caller_max } = self.limits;
        let free = total.saturating_sub(used.total);
        // One large reservation must not take what many small ones could not.
        let Some(free_afterwards) = free.checked_sub(units) else { return false };
        of_caller <= free_afterwards.max(caller_min).min(caller_max)
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        // A panic while the lock is held leaves no partial change, so a poisoned lock is usable.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reserved units. Dropping it releases them.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<FairBudget>,
    caller: CallerId,
    units: usize,
}

impl Reservation {
    /// Adds units. Returns false, and adds none, if there is no room for them.
    #[must_use]
    pub fn grow(&mut self, units: usize) -> bool {
        let mut used = self.budget.used();
        if !self.budget.fits(&used, self.caller, units) {
            return false;
        }
        used.total += units;
        *used.by_caller.entry(self.caller).or_default() += units;
        self.units += units;
        true
    }

    /// Separates units, at most those that it has, which are then released on their own.
    pub fn split(&mut self, units: usize) -> Reservation {
        let units = units.min(self.units);
        self.units -= units;
        Reservation { budget: Arc::clone(&self.budget), caller: self.caller, units }
    }

    pub fn units(&self) -> usize {
        self.units
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut used = self.budget.used();
        used.total -= self.units;
        if let Some(of_caller) = used.by_caller.get_mut(&self.caller) {
            *of_caller -= self.units;
            // Otherwise the map would grow with every caller.
            if *of_caller == 0 {
                used.by_caller.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caller::{Caller, Principal};
    use pillarbox::log::Tenant;
    use uuid::Uuid;

    fn user() -> CallerId {
        CallerId::of(Some(&Caller::new(Principal::User(Uuid::new_v4()), Tenant::main(), None)), None)
    }

    fn budget(total: usize) -> Arc<FairBudget> {
        FairBudget::new(FairLimits { total, caller_min: 10, caller_max: usize::MAX })
    }

    #[test]
    fn a_caller_gets_no_more_than_its_maximum_even_if_more_is_free() {
        let budget = FairBudget::new(FairLimits { total: 40, caller_min: 1, caller_max: 5 });
        let (first, second) = (user(), user());
        let _places: Vec<Reservation> = (0..5).map(|_| budget.reserve(first, 1).unwrap()).collect();
        assert!(budget.reserve(first, 1).is_none());
        assert!(budget.reserve(second, 5).is_some());
    }

    #[test]
    fn a_caller_gets_half_and_all_callers_together_get_the_total() {
        let (budget, callers) = (budget(40), [user(), user(), user()]);
        let mut reservations = callers.map(|caller| budget.reserve(caller, 0).unwrap());
        assert!(reservations[0].grow(20));
        assert!(!reservations[0].grow(1), "more than half");
        assert!(!budget.would_fit(callers[0], 1) && budget.reserve(callers[0], 1).is_none());
        assert!(!reservations[1].grow(11), "more than half of the rest");
        assert!(reservations[1].grow(10) && reservations[2].grow(9));
        assert!(!reservations[2].grow(2), "more than the total");
        assert!(reservations[2].grow(1));
        assert_eq!(reservations[2].units(), 10);
        drop(reservations);
        let used = budget.used();
        assert_eq!((used.total, used.by_caller.len()), (0, 0), "everything is released");
    }

    #[test]
    fn one_large_reservation_gets_no_more_than_many_small_ones() {
        let (budget, caller) = (budget(40), user());
        assert!(budget.reserve(caller, 40).is_none() && budget.reserve(caller, 21).is_none());
        assert!(budget.reserve(caller, 20).is_some());
    }

    #[test]
    fn each_further_caller_gets_half_of_what_is_left_and_at_least_the_minimum() {
        let budget = budget(80);
        let mut reservations: Vec<Reservation> = Vec::new();
        for _ in 0..5 {
            let mut reservation = budget.reserve(user(), 0).unwrap();
            while reservation.grow(1) {}
            reservations.push(reservation);
        }
        assert_eq!(reservations.iter().map(Reservation::units).collect::<Vec<_>>(), [40, 20, 10, 10, 0]);
    }

    #[test]
    fn the_parts_of_a_reservation_are_released_separately() {
        let (budget, caller) = (budget(40), user());
        let mut reservation = budget.reserve(caller, 12).unwrap();
        let part = reservation.split(5);
        assert_eq!((reservation.units(), part.units()), (7, 5));
        drop(reservation);
        assert_eq!(budget.used().total, 5);
        drop(part);
        assert_eq!(budget.used().total, 0);
    }
}
