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

/// Keeps how many were in each batch.
struct Question(Arc<Mutex<Vec<usize>>>);

impl Handler for Question {
    type Item = ();
    type Answer = ();
    type Error = String;

    const GATHERS: bool = true;

    async fn run(&self, items: &[()]) -> Result<Vec<()>, Failure<String>> {
        self.0.lock().unwrap().push(items.len());
        Ok(items.to_vec())
    }
}

#[tokio::test]
async fn what_all_share_takes_along_who_is_ready() {
    let batches = Arc::<Mutex<Vec<usize>>>::default();
    let (batcher, work) = Batcher::new(Question(batches.clone()), Limits::default());
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
