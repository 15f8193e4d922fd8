//! The batcher: one batch in flight, the next gathers while it commits.
//!
//! There is no timer, so a lone item starts at once, or after those that were ready beside it ([`Handler::GATHERS`]); under
//! load the batches grow by themselves, because more items arrive while one is in flight. Everything is bounded: a full
//! queue is answered as overload, never by waiting.
//!
//! A batch that fails because of one of its items, or panics, is bisected until that item stands alone; a batch that
//! fails because of something else (the database is away) fails whole, at once, and one that takes longer than anyone waits
//! for it is given up: a database that vanished without a word must not keep all later batches waiting.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{mpsc, oneshot};

use crate::problem::Problem;
use crate::worker::panic_text;

/// Does the work of one batch, all or nothing.
pub trait Handler: Send + Sync + 'static {
    type Item: Send + Sync + 'static;
    type Answer: Send + 'static;
    type Error: Send + Sync + 'static;

    /// Whether those that are ready come along, although the first one wakes the batcher before they have their turn. For
    /// what costs much the same however many ask. What costs by the item should begin: others are answered meanwhile.
    const GATHERS: bool = false;

    /// One answer per item, in order. Whatever it wrote must be undone when it fails or panics. One that is given up may
    /// have been done: its callers are told that nobody knows.
    fn run(&self, items: &[Self::Item])
    -> impl Future<Output = Result<Vec<Self::Answer>, Failure<Self::Error>>> + Send;

    /// How much of a batch, and of the queue, it takes.
    fn weight(_: &Self::Item) -> usize {
        1
    }
}

/// Why a batch failed, which decides what happens to its other items.
#[derive(Debug)]
pub enum Failure<E> {
    /// One of the items is to blame: look for it, let the others pass.
    Item(E),
    /// No item is to blame: trying parts of the batch would fail as well.
    Whole(E),
}

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// What the items of one batch weigh together. One that weighs more is alone in its batch.
    pub batch_max: usize,
    /// What the items weigh that wait for their batch. One that weighs more waits only where no other does.
    pub queue_max: usize,
    /// How long a batch may take. No request waits longer for its answer.
    pub time_max: Duration,
}

impl Limits {
    pub const fn new(batch_max: usize, queue_max: usize) -> Limits {
        Limits { batch_max, queue_max, time_max: Duration::from_secs(30) }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::new(1_000, 10_000)
    }
}

/// Why an item got no answer.
#[derive(Debug, thiserror::Error)]
pub enum Refused<E> {
    #[error("too many requests are waiting")]
    Overloaded,
    #[error("the server is stopping")]
    Stopped,
    /// Nobody knows whether it was done.
    #[error("no answer within {0:?}")]
    TooSlow(Duration),
    /// Shared with the other items of a batch that failed whole.
    #[error("{0}")]
    Failed(Arc<E>),
    /// A mistake in the handler: it panics on this very item, or loses count of its answers.
    #[error("{0}")]
    Broken(Arc<str>),
}

// Derived, it would ask for `E: Clone`.
impl<E> Clone for Refused<E> {
    fn clone(&self) -> Refused<E> {
        match self {
            Refused::Overloaded => Refused::Overloaded,
            Refused::Stopped => Refused::Stopped,
            Refused::TooSlow(time_max) => Refused::TooSlow(*time_max),
            Refused::Failed(error) => Refused::Failed(error.clone()),
            Refused::Broken(mistake) => Refused::Broken(mistake.clone()),
        }
    }
}

impl<E> Refused<E> {
    /// The public face; `failed` gives the handler's own error its own.
    pub fn into_problem(self, failed: impl FnOnce(&E) -> Problem) -> Problem {
        match self {
            Refused::Overloaded => Problem::overloaded("too many requests are waiting", Duration::from_secs(1)),
            Refused::Stopped => {
                Problem::overloaded("this server is stopping; another one will answer", Duration::from_secs(1))
            }
            Refused::TooSlow(time_max) => Problem::unavailable(&format!("no answer within {time_max:?}")),
            Refused::Failed(error) => failed(&error),
            Refused::Broken(mistake) => Problem::internal(&mistake),
        }
    }
}

type Waiting<H> = oneshot::Sender<Result<<H as Handler>::Answer, Refused<<H as Handler>::Error>>>;

struct Entry<H: Handler> {
    item: H::Item,
    weight: usize,
    waiting: Waiting<H>,
}

/// The near end: clone it into every request.
pub struct Batcher<H: Handler> {
    queue: mpsc::UnboundedSender<Entry<H>>,
    /// What is in the queue; it is bounded by this.
    queued: Arc<AtomicUsize>,
    queue_max: usize,
}

impl<H: Handler> Clone for Batcher<H> {
    fn clone(&self) -> Batcher<H> {
        Batcher { queue: self.queue.clone(), queued: self.queued.clone(), queue_max: self.queue_max }
    }
}

impl<H: Handler> Batcher<H> {
    /// The batcher, and the loop that works for it. The loop ends once every clone is dropped and the queue is empty.
    pub fn new(handler: H, limits: Limits) -> (Batcher<H>, impl Future<Output = ()> + Send) {
        let (queue, entries) = mpsc::unbounded_channel();
        let queued = Arc::<AtomicUsize>::default();
        let gathering = Gathering { entries, queued: queued.clone(), left_over: None };
        (Batcher { queue, queued, queue_max: limits.queue_max }, work(handler, limits, gathering))
    }

    /// Waits for the item's batch. An item whose caller goes away is still worked on: it may be half committed.
    pub async fn submit(&self, item: H::Item) -> Result<H::Answer, Refused<H::Error>> {
        let (waiting, answer) = oneshot::channel();
        // None weighs nothing: there would be no end to them.
        let weight = H::weight(&item).max(1);
        let has_room = |queued: usize| (queued == 0 || queued + weight <= self.queue_max).then_some(queued + weight);
        if self.queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).is_err() {
            return Err(Refused::Overloaded);
        }
        self.queue.send(Entry { item, weight, waiting }).map_err(|_| Refused::Stopped)?;
        answer.await.unwrap_or(Err(Refused::Stopped))
    }
}

async fn work<H: Handler>(handler: H, limits: Limits, mut gathering: Gathering<H>) {
    loop {
        let (items, waiting) = gathering.next(limits.batch_max).await;
        if items.is_empty() {
            return;
        }
        settle(&handler, limits.time_max, &items, waiting).await;
    }
}

/// The far end of the queue.
struct Gathering<H: Handler> {
    entries: mpsc::UnboundedReceiver<Entry<H>>,
    queued: Arc<AtomicUsize>,
    /// It did not fit into the last batch. It is not in the queue any more, but still counts.
    left_over: Option<Entry<H>>,
}

impl<H: Handler> Gathering<H> {
    /// What waits, as far as it fits into a batch; nothing at the end.
    async fn next(&mut self, batch_max: usize) -> (Vec<H::Item>, Vec<Waiting<H>>) {
        let (mut items, mut waiting, mut weight) = (Vec::new(), Vec::new(), 0);
        let mut entry = match self.left_over.take() {
            Some(entry) => Some(entry),
            None => {
                let first = self.entries.recv().await;
                if H::GATHERS {
                    tokio::task::yield_now().await;
                }
                first
            }
        };
        while let Some(taken) = entry {
            if weight + taken.weight > batch_max && !items.is_empty() {
                self.left_over = Some(taken);
                break;
            }
            weight += taken.weight;
            items.push(taken.item);
            waiting.push(taken.waiting);
            entry = self.entries.try_recv().ok();
        }
        self.queued.fetch_sub(weight, Ordering::Relaxed);
        (items, waiting)
    }
}

/// Runs the items; on an item's failure runs both halves. Depth first, so that items keep their order.
async fn settle<H: Handler>(handler: &H, time_max: Duration, items: &[H::Item], waiting: Vec<Waiting<H>>) {
    let mut pending = vec![(items, waiting)];
    while let Some((items, mut waiting)) = pending.pop() {
        // A panic that got out would end the loop, and with it every later batch. The handler is not left half-way:
        // its future, and the transaction in it, is dropped by the unwinding.
        let running = AssertUnwindSafe(async { handler.run(items).await }).catch_unwind();
        let Ok(ran) = tokio::time::timeout(time_max, running).await else {
            refuse::<H>(waiting, Refused::TooSlow(time_max));
            continue;
        };
        match ran {
            Ok(Ok(answers)) if answers.len() == items.len() => {
                for (waiting, answer) in waiting.into_iter().zip(answers) {
                    let _ = waiting.send(Ok(answer)); // the caller may have left
                }
            }
            Ok(Ok(answers)) => {
                // Whose answer is whose is not known, and the work may be committed: trying again could do it twice.
                let mistake = format!("a batch of {} items got {} answers", items.len(), answers.len());
                refuse::<H>(waiting, Refused::Broken(mistake.into()));
            }
            Ok(Err(Failure::Item(_))) | Err(_) if items.len() > 1 => {
                let middle = items.len() / 2;
                let second = waiting.split_off(middle);
                pending.push((&items[middle..], second));
                pending.push((&items[..middle], waiting));
            }
            Ok(Err(Failure::Item(error) | Failure::Whole(error))) => {
                refuse::<H>(waiting, Refused::Failed(Arc::new(error)));
            }
            Err(panic) => {
                let mistake = format!("panic in a batch: {}", panic_text(&*panic));
                refuse::<H>(waiting, Refused::Broken(mistake.into()));
            }
        }
    }
}

/// Logs nothing: each caller does, with its own trace, when it answers.
fn refuse<H: Handler>(waiting: Vec<Waiting<H>>, refused: Refused<H::Error>) {
    for waiting in waiting {
        let _ = waiting.send(Err(refused.clone()));
    }
}

#[cfg(test)]
mod tests;
