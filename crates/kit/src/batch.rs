//! The batcher: one batch in flight, the next gathers while it commits.
//!
//! There is no timer, so a lone item starts at once; under load the batches grow by themselves, because more items
//! arrive while one is in flight. Everything is bounded: a full queue is answered as overload, never by waiting.
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

    /// One answer per item, in order. Whatever it wrote must be undone when it fails, panics or is given up.
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
            None => self.entries.recv().await,
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
mod tests {
    use super::*;
    use std::sync::Mutex;
    use tokio::sync::Semaphore;

    const PANICS: i64 = 1_000;
    const LOSES_COUNT: i64 = 2_000;

    /// Doubles numbers; fails on negative ones; keeps what it was given.
    struct Doubler {
        gate: Arc<Semaphore>,
        batches: Arc<Mutex<Vec<Vec<i64>>>>,
        away: bool,
    }

    impl Handler for Doubler {
        type Item = i64;
        type Answer = i64;
        type Error = String;

        async fn run(&self, items: &[i64]) -> Result<Vec<i64>, Failure<String>> {
            self.batches.lock().unwrap().push(items.to_vec());
            self.gate.acquire().await.unwrap().forget();
            if self.away {
                return Err(Failure::Whole("away".to_owned()));
            }
            assert!(!items.contains(&PANICS), "on purpose");
            match items.iter().find(|&&item| item < 0) {
                Some(poison) => Err(Failure::Item(format!("poison {poison}"))),
                None => Ok(items.iter().filter(|&&item| item != LOSES_COUNT).map(|item| item * 2).collect()),
            }
        }
    }

    struct Fixture {
        batcher: Batcher<Doubler>,
        gate: Arc<Semaphore>,
        batches: Arc<Mutex<Vec<Vec<i64>>>>,
    }

    fn start(limits: Limits, away: bool) -> Fixture {
        let (gate, batches) = (Arc::new(Semaphore::new(0)), Arc::default());
        let (batcher, work) = Batcher::new(Doubler { gate: gate.clone(), batches: Arc::clone(&batches), away }, limits);
        tokio::spawn(work);
        Fixture { batcher, gate, batches }
    }

    impl Fixture {
        /// Waits until so many batches have begun.
        async fn begun(&self, count: usize) {
            while self.batches.lock().unwrap().len() < count {
                tokio::task::yield_now().await;
            }
        }

        fn submit(&self, item: i64) -> tokio::task::JoinHandle<Result<i64, Refused<String>>> {
            let batcher = self.batcher.clone();
            tokio::spawn(async move { batcher.submit(item).await })
        }
    }

    #[tokio::test]
    async fn a_batch_that_never_ends_is_given_up() {
        let fixture = start(Limits { time_max: Duration::from_millis(50), ..Limits::default() }, false);
        let stuck = fixture.submit(1);
        fixture.begun(1).await;
        let next = fixture.submit(2);
        assert!(matches!(stuck.await.unwrap(), Err(Refused::TooSlow(_))));
        fixture.gate.add_permits(1);
        assert_eq!(next.await.unwrap().unwrap(), 4);
    }

    #[tokio::test]
    async fn the_next_batch_gathers_while_one_is_in_flight() {
        let fixture = start(Limits::default(), false);
        let first = fixture.submit(1);
        fixture.begun(1).await;
        let others: Vec<_> = (2..=50).map(|item| fixture.submit(item)).collect();
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
        fixture.gate.add_permits(2);
        assert_eq!(first.await.unwrap().unwrap(), 2);
        for (item, other) in (2..).zip(others) {
            assert_eq!(other.await.unwrap().unwrap(), item * 2);
        }
        let sizes: Vec<_> = fixture.batches.lock().unwrap().iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 49]);
    }

    #[tokio::test]
    async fn a_poison_item_fails_alone() {
        let fixture = start(Limits::default(), false);
        fixture.gate.add_permits(1_000);
        let items: Vec<i64> = (1..=64).map(|item| if item == 37 { -37 } else { item }).collect();
        let answers: Vec<_> = items.iter().map(|&item| fixture.submit(item)).collect();
        for (item, answer) in items.into_iter().zip(answers) {
            match answer.await.unwrap() {
                Ok(doubled) => assert_eq!(doubled, item * 2),
                Err(Refused::Failed(error)) => assert_eq!((item, error.as_str()), (-37, "poison -37")),
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[tokio::test]
    async fn an_item_that_panics_fails_alone_and_the_next_batch_is_served() {
        let fixture = start(Limits::default(), false);
        fixture.gate.add_permits(1_000);
        let items: Vec<i64> = (1..=64).map(|item| if item == 37 { PANICS } else { item }).collect();
        let answers: Vec<_> = items.iter().map(|&item| fixture.submit(item)).collect();
        for (item, answer) in items.into_iter().zip(answers) {
            match answer.await.unwrap() {
                Ok(doubled) => assert_eq!(doubled, item * 2),
                Err(refused @ Refused::Broken(_)) => {
                    assert_eq!((item, refused.to_string().as_str()), (PANICS, "panic in a batch: on purpose"));
                    let problem = refused.into_problem(|_| unreachable!());
                    assert_eq!(problem.status(), http::StatusCode::INTERNAL_SERVER_ERROR);
                }
                Err(other) => panic!("{item}: {other}"),
            }
        }
        assert_eq!(fixture.submit(21).await.unwrap().unwrap(), 42);
    }

    #[tokio::test]
    async fn a_wrong_number_of_answers_is_told_to_all_and_not_tried_again() {
        let fixture = start(Limits::default(), false);
        let answers: Vec<_> = (1..=8).map(|item| fixture.submit(item * LOSES_COUNT)).collect();
        fixture.gate.add_permits(1_000);
        for answer in answers {
            let refused = answer.await.unwrap().unwrap_err();
            assert_eq!(refused.to_string(), "a batch of 8 items got 7 answers");
        }
        assert_eq!(fixture.batches.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_failure_of_the_whole_is_not_bisected() {
        let fixture = start(Limits::default(), true);
        let answers: Vec<_> = (0..64).map(|item| fixture.submit(item)).collect();
        fixture.gate.add_permits(1_000);
        for answer in answers {
            assert!(matches!(answer.await.unwrap(), Err(Refused::Failed(_))));
        }
        assert!(fixture.batches.lock().unwrap().len() <= 2);
    }

    /// Keeps the weights of each batch: an item weighs what it says.
    struct Scales {
        gate: Arc<Semaphore>,
        batches: Arc<Mutex<Vec<Vec<usize>>>>,
    }

    impl Handler for Scales {
        type Item = usize;
        type Answer = ();
        type Error = String;

        async fn run(&self, items: &[usize]) -> Result<Vec<()>, Failure<String>> {
            self.batches.lock().unwrap().push(items.to_vec());
            self.gate.acquire().await.unwrap().forget();
            Ok(vec![(); items.len()])
        }

        fn weight(item: &usize) -> usize {
            *item
        }
    }

    #[tokio::test]
    async fn heavy_items_fill_batches_and_the_queue_by_their_weight() {
        let (gate, batches) = (Arc::new(Semaphore::new(0)), Arc::<Mutex<Vec<Vec<usize>>>>::default());
        let scales = Scales { gate: gate.clone(), batches: batches.clone() };
        let (batcher, work) = Batcher::new(scales, Limits::new(10, 40));
        tokio::spawn(work);
        let submit = |weight: usize| {
            let batcher = batcher.clone();
            tokio::spawn(async move { batcher.submit(weight).await })
        };
        let mut answers = vec![submit(1)];
        while batches.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        for weight in [4, 4, 4, 24, 2, 0, 1] {
            answers.push(submit(weight));
            tokio::task::yield_now().await;
        }
        // 41 with this one: even what weighs nothing counts.
        assert!(matches!(batcher.submit(1).await, Err(Refused::Overloaded)));
        gate.add_permits(100);
        for answer in answers {
            answer.await.unwrap().unwrap();
        }
        assert_eq!(*batches.lock().unwrap(), [vec![1], vec![4, 4], vec![4], vec![24], vec![2, 0, 1]]);
        batcher.submit(1_000).await.unwrap();
        assert_eq!(batcher.queued.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_full_queue_answers_overload_at_once() {
        let fixture = start(Limits::new(1, 4), false);
        let mut answers = vec![fixture.submit(0)];
        fixture.begun(1).await;
        answers.extend((1..20).map(|item| fixture.submit(item)));
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        fixture.gate.add_permits(1_000);
        let mut overloaded = 0;
        for answer in answers {
            match answer.await.unwrap() {
                Ok(_) => {}
                Err(refused @ Refused::Overloaded) => {
                    overloaded += 1;
                    let problem = refused.into_problem(|_| unreachable!());
                    assert_eq!(problem.status(), http::StatusCode::SERVICE_UNAVAILABLE);
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(overloaded, 15, "one in flight, four waiting");
    }
}
