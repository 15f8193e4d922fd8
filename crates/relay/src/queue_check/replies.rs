//! The replies to the checks of this process.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;
use uuid::Uuid;

use crate::control::CheckReply;

/// Passes replies to the checks that wait for them.
pub(super) struct Replies {
    /// The queue that they arrive in.
    pub(super) queue: String,
    waiting: Mutex<HashMap<Uuid, oneshot::Sender<Vec<usize>>>>,
}

impl Replies {
    pub(super) fn new(queue: String) -> Replies {
        Replies { queue, waiting: Mutex::default() }
    }

    /// Registers a check. It is forgotten when the receiver is dropped.
    pub(super) fn expect(&self, check: Uuid) -> oneshot::Receiver<Vec<usize>> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|_, sender| !sender.is_closed());
        waiting.insert(check, sender);
        receiver
    }

    /// Ignores the reply to a check that has given up.
    pub(super) fn deliver(&self, reply: CheckReply) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&reply.id);
        if let Some(sender) = waiting {
            let _ = sender.send(reply.missing);
        }
    }
}
