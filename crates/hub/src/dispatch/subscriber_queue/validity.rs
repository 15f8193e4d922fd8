//! Lets the attempts of a subscriber queue find out that they must no longer be sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the queue still exists and its subscriber has not changed. A queue that is dropped, because its subscriber belongs
/// to another process or its state may be stale, no longer knows what may be sent: an attempt that is still connecting then
/// must not send its request after its successor has sent later messages. Nor may it send a request with the URL, the
/// secrets or the headers from before a change that dispatchers have confirmed.
pub(in crate::dispatch) struct Validity(Arc<AtomicBool>);

impl Validity {
    /// Returns a flag that is true until this value is dropped or replaced.
    pub(in crate::dispatch) fn watch(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }
}

impl Default for Validity {
    fn default() -> Validity {
        Validity(Arc::new(AtomicBool::new(true)))
    }
}

impl Drop for Validity {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
