//! Gates limit concurrency per key, such as one project or one caller. Work above the limit waits here, where it occupies no
//! connection to the database.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The gates of one process, by key. Unused gates are removed.
#[derive(Debug)]
pub struct Gates<K> {
    permits: usize,
    gates: Mutex<HashMap<K, Weak<Semaphore>>>,
}

impl<K: Eq + Hash> Gates<K> {
    /// Each key is in flight at most so many times.
    pub fn new(permits: usize) -> Gates<K> {
        Gates { permits, gates: Mutex::default() }
    }

    /// Waits until it is the turn of the caller, first come, first served. It ends when the permit is dropped.
    pub async fn enter<Q>(&self, key: &Q) -> Option<OwnedSemaphorePermit>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        // Fails only if the semaphore is closed, which never happens.
        self.gate(key).acquire_owned().await.ok()
    }

    /// Enters if a place is free and no other caller waits for it.
    pub fn try_enter<Q>(&self, key: &Q) -> Option<OwnedSemaphorePermit>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        self.gate(key).try_acquire_owned().ok()
    }

    fn gate<Q>(&self, key: &Q) -> Arc<Semaphore>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = gates.get(key).and_then(Weak::upgrade) {
            return gate;
        }
        // When it would grow, so that the cost per key is constant.
        if gates.len() == gates.capacity() {
            gates.retain(|_, gate| gate.strong_count() > 0);
        }
        let gate = Arc::new(Semaphore::new(self.permits));
        gates.insert(key.to_owned(), Arc::downgrade(&gate));
        gate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_waits_for_itself_only_and_its_gate_is_removed_when_unused() {
        let gates = Gates::<String>::new(2);
        let permits = [gates.enter("a").await, gates.enter("a").await, gates.enter("b").await];
        assert!(gates.try_enter("a").is_none(), "a third one waits");
        assert!(gates.try_enter("b").is_some());
        drop(permits);
        assert_eq!(gates.gate("a").available_permits(), 2);
        for number in 0..10_000 {
            gates.enter(number.to_string().as_str()).await;
        }
        assert!(gates.gates.lock().unwrap().len() < 100);
    }
}
