//! Which subscriber may start the next attempt: a share of the slots for each tenant, and turns between tenants and their subscribers.
//!
//! Every attempt in flight occupies a slot of the process. The shares depend on the number of free slots, so that one busy
//! tenant can use most of them, and a new one finds a free slot however many are busy:
//!
//! | may start an attempt while its attempts in flight are below | |
//! |---|---|
//! | a tenant | [`TENANT_FACTOR`] times the free slots |
//! | a tenant, for its slow subscribers | the free slots divided by [`SLOW_DIVISOR`] |
//! | a subscriber | the free slots |
//!
//! Slow subscribers are those whose attempts take seconds, and those that have not answered yet: a tenant can have thousands
//! of them, and each occupies its slot until the timeout.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::subscriber_queue::SubscriberQueue;

/// With k tenants that use their whole share, 1 / (1 + 3k) of the slots stay free.
const TENANT_FACTOR: usize = 3;
/// One tenant with slow subscribers only uses a fifth of the slots.
const SLOW_DIVISOR: usize = 4;

/// The attempts in flight, and the subscriber queues that wait for a slot.
#[derive(Debug)]
pub(super) struct Slots {
    max: usize,
    in_flight: usize,
    tenants: HashMap<Arc<str>, TenantSlots>,
    /// Tenants with waiting subscriber queues, in the order of their turns.
    turns: VecDeque<Arc<str>>,
}

#[derive(Debug, Default)]
struct TenantSlots {
    in_flight: usize,
    slow_in_flight: usize,
    waiting: VecDeque<Uuid>,
    slow_waiting: VecDeque<Uuid>,
}

impl Slots {
    pub(super) fn new(max: usize) -> Slots {
        Slots { max, in_flight: 0, tenants: HashMap::new(), turns: VecDeque::new() }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn free(&self) -> usize {
        self.max.saturating_sub(self.in_flight)
    }

    /// Drops everything, because the subscriber queues no longer exist.
    pub(super) fn reset(&mut self) {
        *self = Slots::new(self.max);
    }

    /// Whether the queue may start one more attempt.
    pub(super) fn allow(&self, queue: &SubscriberQueue, now: DateTime<Utc>) -> bool {
        let is_allowed = |tenant: &TenantSlots| tenant.allows(queue.is_slow(now), self.free());
        !self.is_at_limit(queue) && self.tenants.get(&queue.recipient.tenant).is_none_or(is_allowed)
    }

    /// Whether the queue must finish an attempt before it may start another one.
    pub(super) fn is_at_limit(&self, queue: &SubscriberQueue) -> bool {
        queue.in_flight() >= self.free()
    }

    /// Counts an attempt. Returns whether it counts as one of a slow subscriber.
    pub(super) fn start(&mut self, queue: &mut SubscriberQueue, now: DateTime<Utc>) -> bool {
        let is_slow = queue.is_slow(now);
        let tenant = self.tenant(&queue.recipient.tenant);
        tenant.in_flight += 1;
        tenant.slow_in_flight += usize::from(is_slow);
        self.in_flight += 1;
        queue.slow_in_flight += usize::from(is_slow);
        is_slow
    }

    /// `is_slow` is what [`Slots::start`] returned.
    pub(super) fn finish(&mut self, queue: &mut SubscriberQueue, is_slow: bool) {
        queue.slow_in_flight -= usize::from(is_slow);
        self.release(&queue.recipient.tenant, 1, usize::from(is_slow));
    }

    /// Drops the attempts of a removed queue from the counts.
    pub(super) fn drop_queue(&mut self, queue: &SubscriberQueue) {
        self.release(&queue.recipient.tenant, queue.in_flight(), queue.slow_in_flight);
    }

    fn release(&mut self, tenant: &Arc<str>, in_flight: usize, slow_in_flight: usize) {
        self.in_flight -= in_flight;
        let tenant = self.tenant(tenant);
        tenant.in_flight -= in_flight;
        tenant.slow_in_flight -= slow_in_flight;
    }

    /// Lets the queue wait for its turn, unless it already does.
    pub(super) fn enqueue(&mut self, queue: &mut SubscriberQueue, now: DateTime<Utc>) {
        if std::mem::replace(&mut queue.waits_for_slot, true) {
            return;
        }
        let (id, is_slow, name) = (queue.recipient.id, queue.is_slow(now), &queue.recipient.tenant);
        let tenant = self.tenant(name);
        let has_turn = !tenant.is_idle();
        if is_slow {
            tenant.slow_waiting.push_back(id)
        } else {
            tenant.waiting.push_back(id)
        }
        if !has_turn {
            self.turns.push_back(name.clone());
        }
    }

    /// The number of tenants with waiting subscriber queues.
    pub(super) fn turns(&self) -> usize {
        self.turns.len()
    }

    /// The next waiting subscriber of the tenant whose turn it is, or None if all of that tenant have to wait. Each call
    /// is the turn of another tenant.
    pub(super) fn next_turn(&mut self) -> Option<Uuid> {
        let (name, free) = (self.turns.pop_front()?, self.free());
        let tenant = self.tenants.get_mut(&name)?;
        let next = if !tenant.waiting.is_empty() && tenant.allows(false, free) {
            tenant.waiting.pop_front()
        } else if tenant.allows(true, free) {
            tenant.slow_waiting.pop_front()
        } else {
            None
        };
        if !tenant.is_idle() {
            self.turns.push_back(name);
        }
        next
    }

    fn tenant(&mut self, name: &Arc<str>) -> &mut TenantSlots {
        self.tenants.entry(name.clone()).or_default()
    }
}

impl TenantSlots {
    fn allows(&self, is_slow: bool, free: usize) -> bool {
        self.in_flight < free.saturating_mul(TENANT_FACTOR)
            && (!is_slow || self.slow_in_flight < (free / SLOW_DIVISOR).max(1))
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.slow_waiting.is_empty()
    }
}
