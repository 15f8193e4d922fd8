//! The permission to send a request, which may end while its connection is being opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pillarbox::consumers::Lease;
use webhook_client::Permit;

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
}

impl Permit for SendPermit {
    fn is_valid(&self) -> bool {
        self.lease.is_valid() && self.is_current.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    use std::time::Duration;

    use super::*;

    /// A lease that never expires.
    pub(crate) fn permanent_lease() -> Lease {
        Lease::of_one_heartbeat(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_permit_ends_with_its_lease_and_with_its_queue() {
        let is_current = Arc::new(AtomicBool::new(true));
        let permit = SendPermit::new(fixtures::permanent_lease(), is_current.clone());
        assert!(permit.is_valid());
        is_current.store(false, Ordering::SeqCst);
        assert!(!permit.is_valid());
        let permit = SendPermit::new(Lease::of_one_heartbeat(Duration::from_millis(20)), Arc::new(true.into()));
        let deadline = Instant::now() + Duration::from_secs(10);
        while permit.is_valid() {
            assert!(Instant::now() < deadline, "the permit has not ended with its lease");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
