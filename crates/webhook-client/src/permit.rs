//! The permission to send a request, which may end while its connection is being opened.

/// Permits one request for as long as it is valid. The connection asks immediately before it writes the first bytes of the
/// request, on the thread that writes: the answer must be quick.
pub trait Permit: Send + Sync + 'static {
    /// Returns whether the request may still be sent.
    fn is_valid(&self) -> bool;
}

#[cfg(test)]
pub(crate) mod fixtures {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    impl Permit for AtomicBool {
        fn is_valid(&self) -> bool {
            self.load(Ordering::SeqCst)
        }
    }

    /// A permit that ends when the flag is cleared.
    pub(crate) fn revocable_permit() -> (Arc<dyn Permit>, Arc<AtomicBool>) {
        let flag = Arc::new(AtomicBool::new(true));
        (flag.clone(), flag)
    }
}
