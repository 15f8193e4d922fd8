//! Invalidations: the one signal on which everything that a process remembers from the database is dropped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// The invalidations of a process. Clones share one state.
#[derive(Clone, Default)]
pub(crate) struct Invalidations(Arc<Inner>);

#[derive(Default)]
struct Inner {
    count: AtomicU64,
    hooks: RwLock<Vec<Hook>>,
}

/// Drops one cache.
type Hook = Box<dyn Fn() + Send + Sync>;

impl Invalidations {
    /// Calls the hook at each invalidation from now on. It must not block.
    pub(super) fn subscribe(&self, hook: Hook) {
        self.0.hooks.write().unwrap_or_else(PoisonError::into_inner).push(hook);
    }

    /// Returns the number of invalidations so far.
    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::SeqCst)
    }

    /// Makes every observer drop what it remembers: the database may have lost transactions.
    pub(crate) fn invalidate(&self) {
        self.0.count.fetch_add(1, Ordering::SeqCst);
        self.0.hooks.read().unwrap_or_else(PoisonError::into_inner).iter().for_each(|hook| hook());
    }
}

impl std::fmt::Debug for Invalidations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Invalidations").field(&self.count()).finish()
    }
}
