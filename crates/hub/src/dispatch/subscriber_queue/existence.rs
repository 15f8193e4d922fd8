//! Lets the attempts of a subscriber queue find out that the queue was dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the queue still exists. A queue that is dropped, because its subscriber belongs to another
/// process or its state may be stale, no longer knows what may be sent: an attempt that is still connecting then must not
/// send its request after its successor has sent later messages.
pub(in crate::dispatch) struct Existence(Arc<AtomicBool>);

impl Existence {
    /// Returns a flag that is true until the queue is dropped.
    pub(in crate::dispatch) fn watch(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }
}

impl Default for Existence {
    fn default() -> Existence {
        Existence(Arc::new(AtomicBool::new(true)))
    }
}

impl Drop for Existence {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
