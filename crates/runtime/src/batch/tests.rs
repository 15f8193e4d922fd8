//! Tests of the batcher.

use super::*;
use std::sync::Mutex;
use tokio::sync::Semaphore;

const PANICS: i64 = 1_000;
const OMITTED: i64 = 2_000;

/// Doubles numbers, fails on negative ones, and records its batches.
struct Doubler {
    gate: Arc<Semaphore>,
    batches: Arc<Mutex<Vec<Vec<i64>>>>,
    unavailable: bool,
}

impl BatchHandler for Doubler {
    type Item = i64;
    type Output = i64;
    type Error = String;

    async fn run(&self, items: &[i64]) -> Result<Vec<i64>, BatchError<String>> {
        self.batches.lock().unwrap().push(items.to_vec());
        self.gate.acquire().await.unwrap().forget();
        if self.unavailable {
            return Err(BatchError::Whole("unavailable".to_owned()));
        }
        assert!(!items.contains(&PANICS), "on purpose");
        match items.iter().find(|&&item| item < 0) {
            Some(poison) => Err(BatchError::Item(format!("poison {poison}"))),
            None => Ok(items.iter().filter(|&&item| item != OMITTED).map(|item| item * 2).collect()),
        }
    }
}

struct Fixture {
    batcher: Batcher<Doubler>,
    gate: Arc<Semaphore>,
    batches: Arc<Mutex<Vec<Vec<i64>>>>,
}

fn start(limits: Limits, unavailable: bool) -> Fixture {
    let (gate, batches) = (Arc::new(Semaphore::new(0)), Arc::default());
    let (batcher, work) =
        Batcher::new(Doubler { gate: gate.clone(), batches: Arc::clone(&batches), unavailable }, limits);
    tokio::spawn(work);
    Fixture { batcher, gate, batches }
}

impl Fixture {
    /// Waits until `count` batches have started.
    async fn started(&self, count: usize) {
        while self.batches.lock().unwrap().len() < count {
            tokio::task::yield_now().await;
        }
    }

    fn submit(&self, item: i64) -> tokio::task::JoinHandle<Result<i64, SubmitError<String>>> {
        let batcher = self.batcher.clone();
        tokio::spawn(async move { batcher.submit(item).await })
    }
}

#[tokio::test]
async fn a_batch_that_exceeds_its_time_limit_fails() {
    let fixture = start(Limits { time_max: Duration::from_millis(50), ..Limits::default() }, false);
    let stuck = fixture.submit(1);
    fixture.started(1).await;
    let next = fixture.submit(2);
    assert!(matches!(stuck.await.unwrap(), Err(SubmitError::TooSlow(_))));
    fixture.gate.add_permits(1);
    assert_eq!(next.await.unwrap().unwrap(), 4);
}

#[tokio::test]
async fn the_next_batch_collects_items_while_one_is_in_flight() {
    let fixture = start(Limits::default(), false);
    let first = fixture.submit(1);
    fixture.started(1).await;
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
    let results: Vec<_> = items.iter().map(|&item| fixture.submit(item)).collect();
    for (item, result) in items.into_iter().zip(results) {
        match result.await.unwrap() {
            Ok(doubled) => assert_eq!(doubled, item * 2),
            Err(SubmitError::Failed(error)) => assert_eq!((item, error.as_str()), (-37, "poison -37")),
            Err(other) => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn an_item_that_panics_fails_alone_and_later_batches_run() {
    let fixture = start(Limits::default(), false);
    fixture.gate.add_permits(1_000);
    let items: Vec<i64> = (1..=64).map(|item| if item == 37 { PANICS } else { item }).collect();
    let results: Vec<_> = items.iter().map(|&item| fixture.submit(item)).collect();
    for (item, result) in items.into_iter().zip(results) {
        match result.await.unwrap() {
            Ok(doubled) => assert_eq!(doubled, item * 2),
            Err(error @ SubmitError::Broken(_)) => {
                assert_eq!((item, error.to_string().as_str()), (PANICS, "panic in a batch: on purpose"));
            }
            Err(other) => panic!("{item}: {other}"),
        }
    }
    assert_eq!(fixture.submit(21).await.unwrap().unwrap(), 42);
}

#[tokio::test]
async fn a_wrong_number_of_outputs_fails_all_items_without_a_retry() {
    let fixture = start(Limits::default(), false);
    let results: Vec<_> = (1..=8).map(|item| fixture.submit(item * OMITTED)).collect();
    fixture.gate.add_permits(1_000);
    for result in results {
        let error = result.await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "a batch of 8 items got 7 outputs");
    }
    assert_eq!(fixture.batches.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_batch_that_fails_as_a_whole_is_not_bisected() {
    let fixture = start(Limits::default(), true);
    let results: Vec<_> = (0..64).map(|item| fixture.submit(item)).collect();
    fixture.gate.add_permits(1_000);
    for result in results {
        assert!(matches!(result.await.unwrap(), Err(SubmitError::Failed(_))));
    }
    assert!(fixture.batches.lock().unwrap().len() <= 2);
}

/// Records the weights of each batch. The weight of an item is its value.
struct Weigher {
    gate: Arc<Semaphore>,
    batches: Arc<Mutex<Vec<Vec<usize>>>>,
}

impl BatchHandler for Weigher {
    type Item = usize;
    type Output = ();
    type Error = String;

    async fn run(&self, items: &[usize]) -> Result<Vec<()>, BatchError<String>> {
        self.batches.lock().unwrap().push(items.to_vec());
        self.gate.acquire().await.unwrap().forget();
        Ok(vec![(); items.len()])
    }

    fn weight(item: &usize) -> usize {
        *item
    }
}

#[tokio::test]
async fn batches_and_the_queue_are_bounded_by_weight() {
    let (gate, batches) = (Arc::new(Semaphore::new(0)), Arc::<Mutex<Vec<Vec<usize>>>>::default());
    let weigher = Weigher { gate: gate.clone(), batches: batches.clone() };
    let (batcher, work) = Batcher::new(weigher, Limits::new(10, 40));
    tokio::spawn(work);
    let submit = |weight: usize| {
        let batcher = batcher.clone();
        tokio::spawn(async move { batcher.submit(weight).await })
    };
    let mut results = vec![submit(1)];
    while batches.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    for weight in [4, 4, 4, 24, 2, 0, 1] {
        results.push(submit(weight));
        tokio::task::yield_now().await;
    }
    // The weight would be 41: an item of weight 0 counts as 1.
    assert!(matches!(batcher.submit(1).await, Err(SubmitError::Overloaded)));
    gate.add_permits(100);
    for result in results {
        result.await.unwrap().unwrap();
    }
    assert_eq!(*batches.lock().unwrap(), [vec![1], vec![4, 4], vec![4], vec![24], vec![2, 0, 1]]);
    batcher.submit(1_000).await.unwrap();
    assert_eq!(batcher.queued.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_full_queue_fails_with_overload_at_once() {
    let fixture = start(Limits::new(1, 4), false);
    let mut results = vec![fixture.submit(0)];
    fixture.started(1).await;
    results.extend((1..20).map(|item| fixture.submit(item)));
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    fixture.gate.add_permits(1_000);
    let mut overloaded = 0;
    for result in results {
        match result.await.unwrap() {
            Ok(_) => {}
            Err(SubmitError::Overloaded) => overloaded += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(overloaded, 15, "one in flight, four waiting");
}

/// Records the size of each batch.
struct SizeRecorder(Arc<Mutex<Vec<usize>>>);

impl BatchHandler for SizeRecorder {
    type Item = ();
    type Output = ();
    type Error = String;

    const COALESCES: bool = true;

    async fn run(&self, items: &[()]) -> Result<Vec<()>, BatchError<String>> {
        self.0.lock().unwrap().push(items.len());
        Ok(items.to_vec())
    }
}

#[tokio::test]
async fn a_coalescing_batch_includes_the_items_that_are_ready() {
    let batches = Arc::<Mutex<Vec<usize>>>::default();
    let (batcher, work) = Batcher::new(SizeRecorder(batches.clone()), Limits::default());
    tokio::spawn(work);
    let second = async {
        tokio::task::yield_now().await;
        batcher.submit(()).await
    };
    let (first, second) = tokio::join!(batcher.submit(()), second);
    assert!(first.is_ok() && second.is_ok());
    assert_eq!(*batches.lock().unwrap(), [2]);
    batcher.submit(()).await.unwrap();
    assert_eq!(*batches.lock().unwrap(), [2, 1]);
}
