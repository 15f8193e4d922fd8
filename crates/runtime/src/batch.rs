//! The batcher: combines concurrent requests into batches. One batch is in flight; the next one collects items
//! in between.
//!
//! There is no timer: a lone item starts at once, or together with the items that are ready at the same time
//! ([`BatchHandler::COALESCES`]). Under load the batches grow, because more items arrive while one batch is in
//! flight. The queue is bounded: when it is full, `submit` fails with an overload error instead of waiting.
//!
//! A batch that fails because of one of its items, or panics, is bisected until that item is alone. A batch that
//! fails for another reason (the database is unavailable) fails as a whole, and so does one that exceeds its time
//! limit: a database that stopped responding must not block all later batches.
//!
//! Every batch of requests goes through this module. `service::batched_writes` is its handler for writes. Handlers that
//! only read set [`BatchHandler::COALESCES`].

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{mpsc, oneshot};

use crate::deadline;
use crate::worker::panic_text;

/// Processes one batch, all or nothing.
pub trait BatchHandler: Send + Sync + 'static {
    type Item: Send + Sync + 'static;
    type Output: Send + 'static;
    type Error: Send + Sync + 'static;

    /// Whether the batcher yields once before it starts a batch, so that tasks which are ready to submit can join it.
    /// True for work whose cost hardly depends on the number of items. Work whose cost grows with each item should
    /// start at once.
    const COALESCES: bool = false;

    /// Returns one output per item, in order. All its writes must be rolled back when it fails or panics. A run that
    /// exceeds the time limit may have committed; its callers get [`SubmitError::TooSlow`].
    fn run(
        &self,
        items: &[Self::Item],
    ) -> impl Future<Output = Result<Vec<Self::Output>, BatchError<Self::Error>>> + Send;

    /// Returns the share of the batch limit and of the queue limit that an item uses.
    fn weight(_: &Self::Item) -> usize {
        1
    }
}

/// The reason why a batch failed. It determines what happens to the other items.
#[derive(Debug)]
pub enum BatchError<E> {
    /// One of the items caused the failure: the batcher bisects the batch to find it.
    Item(E),
    /// The failure has another cause, so the parts of the batch would fail as well.
    Whole(E),
}

/// The default time limit of a batch. A batch takes milliseconds, so one that takes seconds most likely waits for a
/// connection that is dead, and so does every batch behind it.
const BATCH_TIME_MAX: Duration = Duration::from_secs(5);

/// The bounds of a batcher.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The largest total weight of one batch. An item above it is alone in its batch.
    pub batch_max: usize,
    /// The largest total weight of the queue. An item above it is queued only when the queue is empty.
    pub queue_max: usize,
    /// The time limit of one batch.
    pub time_max: Duration,
}

impl Limits {
    pub const fn new(batch_max: usize, queue_max: usize) -> Limits {
        Limits { batch_max, queue_max, time_max: BATCH_TIME_MAX }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::new(1_000, 10_000)
    }
}

/// The reason why an item got no output.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError<E> {
    #[error("too many requests are waiting")]
    Overloaded,
    #[error("the server is stopping")]
    Stopped,
    /// It is unknown whether the batch was committed.
    #[error("no result within {0:?}")]
    TooSlow(Duration),
    /// The handler's error, shared by all items of a batch that failed as a whole.
    #[error("{0}")]
    Failed(Arc<E>),
    /// A bug in the handler: it panicked on this item, or returned a wrong number of outputs.
    #[error("{0}")]
    Broken(Arc<str>),
}

// A derived implementation would require `E: Clone`.
impl<E> Clone for SubmitError<E> {
    fn clone(&self) -> SubmitError<E> {
        match self {
            SubmitError::Overloaded => SubmitError::Overloaded,
            SubmitError::Stopped => SubmitError::Stopped,
            SubmitError::TooSlow(time_max) => SubmitError::TooSlow(*time_max),
            SubmitError::Failed(error) => SubmitError::Failed(error.clone()),
            SubmitError::Broken(bug) => SubmitError::Broken(bug.clone()),
        }
    }
}

/// Where the result of one item is sent.
type Reply<H> = oneshot::Sender<Result<<H as BatchHandler>::Output, SubmitError<<H as BatchHandler>::Error>>>;

struct Entry<H: BatchHandler> {
    item: H::Item,
    weight: usize,
    reply: Reply<H>,
}

/// The handle that requests use to submit items. It is cheap to clone.
pub struct Batcher<H: BatchHandler> {
    queue: mpsc::UnboundedSender<Entry<H>>,
    /// The total weight of the queue. The channel itself has no bound; this does.
    queued: Arc<AtomicUsize>,
    queue_max: usize,
}

impl<H: BatchHandler> Clone for Batcher<H> {
    fn clone(&self) -> Batcher<H> {
        Batcher { queue: self.queue.clone(), queued: self.queued.clone(), queue_max: self.queue_max }
    }
}

impl<H: BatchHandler> Batcher<H> {
    /// Returns the batcher and the loop that processes its batches. The loop ends when all clones are dropped and the
    /// queue is empty.
    pub fn new(handler: H, limits: Limits) -> (Batcher<H>, impl Future<Output = ()> + Send) {
        let (queue, entries) = mpsc::unbounded_channel();
        let queued = Arc::<AtomicUsize>::default();
        let queue_reader = QueueReader { entries, queued: queued.clone(), postponed: None };
        (Batcher { queue, queued, queue_max: limits.queue_max }, process_batches(handler, limits, queue_reader))
    }

    /// Waits for the result of the item's batch. The item is processed even if the caller is dropped, because its
    /// batch may already be committing.
    pub async fn submit(&self, item: H::Item) -> Result<H::Output, SubmitError<H::Error>> {
        let (reply, output) = oneshot::channel();
        // Minimum weight 1, so that a batch is always bounded.
        let weight = H::weight(&item).max(1);
        let enqueue = |queued: usize| (queued == 0 || queued + weight <= self.queue_max).then_some(queued + weight);
        if self.queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enqueue).is_err() {
            return Err(SubmitError::Overloaded);
        }
        self.queue.send(Entry { item, weight, reply }).map_err(|_| SubmitError::Stopped)?;
        output.await.unwrap_or(Err(SubmitError::Stopped))
    }
}

/// Processes one batch after another until the queue is closed and empty.
async fn process_batches<H: BatchHandler>(handler: H, limits: Limits, mut queue_reader: QueueReader<H>) {
    loop {
        let (items, replies) = queue_reader.next(limits.batch_max).await;
        if items.is_empty() {
            return;
        }
        process(&handler, limits.time_max, &items, replies).await;
    }
}

/// The receiving end of the queue.
struct QueueReader<H: BatchHandler> {
    entries: mpsc::UnboundedReceiver<Entry<H>>,
    queued: Arc<AtomicUsize>,
    /// An entry that did not fit into the previous batch. It is no longer in the channel, but `queued` still includes
    /// it.
    postponed: Option<Entry<H>>,
}

impl<H: BatchHandler> QueueReader<H> {
    /// Waits for an entry, then returns the queued entries that fit into one batch. Returns nothing when the queue is
    /// closed and empty.
    async fn next(&mut self, batch_max: usize) -> (Vec<H::Item>, Vec<Reply<H>>) {
        let (mut items, mut replies, mut weight) = (Vec::new(), Vec::new(), 0);
        let mut entry = match self.postponed.take() {
            Some(entry) => Some(entry),
            None => {
                let first = self.entries.recv().await;
                if H::COALESCES {
                    tokio::task::yield_now().await;
                }
                first
            }
        };
        while let Some(next) = entry {
            if weight + next.weight > batch_max && !items.is_empty() {
                self.postponed = Some(next);
                break;
            }
            weight += next.weight;
            items.push(next.item);
            replies.push(next.reply);
            entry = self.entries.try_recv().ok();
        }
        self.queued.fetch_sub(weight, Ordering::Relaxed);
        (items, replies)
    }
}

/// Runs the handler on the items; when an item fails, runs both halves. Depth first, so that items are processed in
/// their order.
async fn process<H: BatchHandler>(handler: &H, time_max: Duration, items: &[H::Item], replies: Vec<Reply<H>>) {
    let mut pending = vec![(items, replies)];
    while let Some((items, mut replies)) = pending.pop() {
        // An uncaught panic would end the loop and with it all later batches. Unwinding drops the handler's future
        // and the transaction in it, so nothing is half done.
        let running = AssertUnwindSafe(async { handler.run(items).await }).catch_unwind();
        let Ok(ran) = deadline::within(time_max, running).await else {
            reject::<H>(replies, SubmitError::TooSlow(time_max));
            continue;
        };
        match ran {
            Ok(Ok(outputs)) if outputs.len() == items.len() => {
                for (reply, output) in replies.into_iter().zip(outputs) {
                    let _ = reply.send(Ok(output)); // The caller may have been dropped.
                }
            }
            Ok(Ok(outputs)) => {
                // It is unknown which output belongs to which item, and the work may be committed: running it again
                // could do it twice.
                let bug = format!("a batch of {} items got {} outputs", items.len(), outputs.len());
                reject::<H>(replies, SubmitError::Broken(bug.into()));
            }
            Ok(Err(BatchError::Item(_))) | Err(_) if items.len() > 1 => {
                let middle = items.len() / 2;
                let second = replies.split_off(middle);
                pending.push((&items[middle..], second));
                pending.push((&items[..middle], replies));
            }
            Ok(Err(BatchError::Item(error) | BatchError::Whole(error))) => {
                reject::<H>(replies, SubmitError::Failed(Arc::new(error)));
            }
            Err(panic) => {
                let bug = format!("panic in a batch: {}", panic_text(&*panic));
                reject::<H>(replies, SubmitError::Broken(bug.into()));
            }
        }
    }
}

/// Does not log: each caller logs the error under its own trace when it responds.
fn reject<H: BatchHandler>(replies: Vec<Reply<H>>, error: SubmitError<H::Error>) {
    for reply in replies {
        let _ = reply.send(Err(error.clone()));
    }
}

#[cfg(test)]
mod tests;
