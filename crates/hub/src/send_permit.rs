//! The permission to send a request, which may end while its connection is being opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mailbox::consumers::Lease;

/// Permits one request as long as no other process can own the subscriber, and the subscriber queue is current: it exists,
/// and its subscriber has not changed. The connection checks it immediately before it writes the first bytes of the request.
#[derive(Debug, Clone)]
pub(crate) struct SendPermit {
    lease: Lease,
    is_current: Arc<AtomicBool>,
}

impl SendPermit {
    pub(crate) fn new(lease: Lease, is_current: Arc<AtomicBool>) -> SendPermit {
        SendPermit { lease, is_current }
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.lease.is_valid() && self.is_current.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    /// A permit that ends when the flag is cleared.
    pub(crate) fn revocable_permit() -> (SendPermit, Arc<AtomicBool>) {
        let is_current = Arc::new(AtomicBool::new(true));
        (SendPermit::new(Lease::permanent(), is_current.clone()), is_current)
    }
}
