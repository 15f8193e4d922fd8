//! Work that occupies a core, on separate threads: password hashes, schemas of event types.
//!
//! Such work must not run on a thread that serves requests, nor on the blocking threads that all code of the process shares.
//! A pool has few threads of the lowest priority. A key, such as a tenant, identifies its callers: keys take turns, a
//! key runs at most a part of the threads at the same time, and the queues of a key and of the pool are bounded. A pool whose
//! queue is full refuses the newest job of the key with the most, so that many callers of one kind leave room for another. A
//! caller that stops waiting takes its job out of the queue.
//!
//! The pool cannot interrupt a job: the job bounds its own time and memory.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

/// The nice value of the threads: the lowest priority.
const NICE: i32 = 19;
/// After this time without work, a thread calls [`WorkPoolOptions::on_idle`].
const IDLE_MAX: Duration = Duration::from_secs(5);

/// The bounds of a pool.
#[derive(Debug, Clone, Copy)]
pub struct WorkPoolOptions {
    /// The name of the threads; Linux shows 15 characters of it.
    pub name: &'static str,
    /// 0: one for each core.
    pub threads: usize,
    /// How many jobs wait in total.
    pub queue_max: usize,
    /// How many jobs of a key wait.
    pub queue_per_key_max: usize,
    /// How many jobs of a key run at the same time.
    pub running_per_key_max: usize,
    /// Called on each thread that had no work for five seconds, to release what it keeps for the next job.
    pub on_idle: fn(),
}

/// Why a job has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WorkRefused {
    #[error("the queue of this caller is full")]
    CallerQueueFull,
    #[error("the queue of all callers is full")]
    QueueFull,
    #[error("the job panicked, or the pool has ended")]
    Failed,
}

/// Runs jobs on its threads. Dropping it ends them; jobs that still wait fail.
#[derive(Debug)]
pub struct WorkPool<K: Eq + Hash + Clone + Send + 'static> {
    queue: Arc<Queue<K>>,
}

#[derive(Debug)]
struct Queue<K> {
    state: Mutex<State<K>>,
    ready: Condvar,
    options: WorkPoolOptions,
}

struct State<K> {
    /// The keys that have jobs waiting and may start one, in the order of their turns.
    turns: VecDeque<K>,
    keys: HashMap<K, KeyState>,
    waiting: usize,
    is_closed: bool,
}

#[derive(Default)]
struct KeyState {
    jobs: VecDeque<Job>,
    running: usize,
    /// Whether the key is in [`State::turns`].
    has_turn: bool,
}

struct Job {
    run: Box<dyn FnOnce() + Send>,
    /// Ends the job without running it.
    refuse: Box<dyn FnOnce(WorkRefused) + Send>,
    /// Whether the result is no longer waited for.
    is_abandoned: Box<dyn Fn() -> bool + Send>,
}

impl<K> std::fmt::Debug for State<K> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("State").field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

impl<K: Eq + Hash + Clone + Send + 'static> WorkPool<K> {
    /// Starts the threads. Fails if one cannot be started.
    pub fn start(options: WorkPoolOptions) -> std::io::Result<WorkPool<K>> {
        let state = State { turns: VecDeque::new(), keys: HashMap::new(), waiting: 0, is_closed: false };
        let queue = Arc::new(Queue { state: Mutex::new(state), ready: Condvar::new(), options });
        let pool = WorkPool { queue: queue.clone() };
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            count => count,
        };
        for _ in 0..threads {
            let queue = queue.clone();
            std::thread::Builder::new().name(options.name.to_owned()).spawn(move || queue.work())?;
        }
        Ok(pool)
    }

    /// Runs a job when it is the turn of its key, and returns its result. A job that has not started when the future is dropped
    /// never runs.
    pub async fn run<T: Send + 'static>(
        &self,
        key: K,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, WorkRefused> {
        let (sender, receiver) = oneshot::channel();
        let sender = Arc::new(Mutex::new(Some(sender)));
        let (of_run, of_refuse) = (sender.clone(), sender.clone());
        let run = move || {
            if let Ok(result) = catch_unwind(AssertUnwindSafe(job)) {
                answer(&of_run, Ok(result));
            }
        };
        let refuse = move |refused| answer(&of_refuse, Err(refused));
        let is_abandoned = move || {
            let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
            sender.as_ref().is_none_or(oneshot::Sender::is_closed)
        };
        let job = Job { run: Box::new(run), refuse: Box::new(refuse), is_abandoned: Box::new(is_abandoned) };
        self.queue.push(key, job)?;
        receiver.await.unwrap_or(Err(WorkRefused::Failed))
    }
}

/// The result of a job is sent once.
type ResultSender<T> = Mutex<Option<oneshot::Sender<Result<T, WorkRefused>>>>;

fn answer<T>(sender: &ResultSender<T>, result: Result<T, WorkRefused>) {
    if let Some(sender) = sender.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // Fails if the caller has stopped waiting.
        let _ = sender.send(result);
    }
}

impl<K: Eq + Hash + Clone + Send + 'static> Drop for WorkPool<K> {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.is_closed = true;
        state.turns.clear();
        let keys = std::mem::take(&mut state.keys);
        drop(state);
        drop(keys); // their callers get WorkRefused::Failed
        self.queue.ready.notify_all();
    }
}

impl<K: Eq + Hash + Clone + Send + 'static> Queue<K> {
    fn lock(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, key: K, job: Job) -> Result<(), WorkRefused> {
        let mut state = self.lock();
        let of_key = state.keys.get(&key).map_or(0, |of_key| of_key.jobs.len());
        if of_key >= self.options.queue_per_key_max {
            state.remove_abandoned(&key);
            if state.keys.get(&key).map_or(0, |of_key| of_key.jobs.len()) >= self.options.queue_per_key_max {
                return Err(WorkRefused::CallerQueueFull);
            }
        }
        if state.waiting >= self.options.queue_max {
            let evicted = state.pop_newest_of_longest(&key).ok_or(WorkRefused::QueueFull)?;
            (evicted.refuse)(WorkRefused::QueueFull);
        }
        state.waiting += 1;
        state.keys.entry(key.clone()).or_default().jobs.push_back(job);
        state.give_turn(key, self.options.running_per_key_max);
        self.ready.notify_one();
        Ok(())
    }

    /// Waits for the next job. None: there was none for some time. Fails if the pool was dropped.
    fn next(&self) -> Result<Option<(K, Job)>, Closed> {
        let is_idle = |state: &mut State<K>| state.turns.is_empty() && !state.is_closed;
        let waited = self.ready.wait_timeout_while(self.lock(), IDLE_MAX, is_idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.is_closed {
            return Err(Closed);
        }
        Ok(state.next_turn(self.options.running_per_key_max))
    }

    fn work(&self) {
        lower_priority(self.options.name);
        while let Ok(next) = self.next() {
            let Some((key, job)) = next else {
                (self.options.on_idle)();
                continue;
            };
            if !(job.is_abandoned)() {
                (job.run)();
            }
            self.lock().end(&key, self.options.running_per_key_max);
            // The key may have a turn again.
            self.ready.notify_one();
        }
    }
}

impl<K: Eq + Hash + Clone> State<K> {
    /// Puts a key at the end of the turns, if it has a job and may start one.
    fn give_turn(&mut self, key: K, running_max: usize) {
        let Some(of_key) = self.keys.get_mut(&key) else { return };
        if !of_key.has_turn && !of_key.jobs.is_empty() && of_key.running < running_max {
            of_key.has_turn = true;
            self.turns.push_back(key);
        }
    }

    /// Takes a job of the key whose turn it is.
    fn next_turn(&mut self, running_max: usize) -> Option<(K, Job)> {
        let key = self.turns.pop_front()?;
        let of_key = self.keys.get_mut(&key)?;
        of_key.has_turn = false;
        let Some(job) = of_key.jobs.pop_front() else {
            if of_key.running == 0 {
                self.keys.remove(&key);
            }
            return None;
        };
        of_key.running += 1;
        self.waiting = self.waiting.saturating_sub(1);
        self.give_turn(key.clone(), running_max);
        Some((key, job))
    }

    /// Notes the end of a job. Keys without jobs are forgotten.
    fn end(&mut self, key: &K, running_max: usize) {
        let Some(of_key) = self.keys.get_mut(key) else { return };
        of_key.running = of_key.running.saturating_sub(1);
        if of_key.running == 0 && of_key.jobs.is_empty() {
            self.keys.remove(key);
        } else {
            self.give_turn(key.clone(), running_max);
        }
    }

    /// Takes the newest job of the key that has the most, if those are more than the jobs of `other` with one more. The cost is
    /// that of a walk over the keys that wait.
    fn pop_newest_of_longest(&mut self, other: &K) -> Option<Job> {
        let of_other = self.keys.get(other).map_or(0, |of_key| of_key.jobs.len());
        let longest = self.keys.values_mut().max_by_key(|of_key| of_key.jobs.len())?;
        if longest.jobs.len() <= of_other + 1 {
            return None;
        }
        let newest = longest.jobs.pop_back()?;
        self.waiting = self.waiting.saturating_sub(1);
        Some(newest)
    }

    /// Removes the jobs of a key whose callers have stopped waiting. A key that has a turn keeps it: [`State::next_turn`]
    /// passes over a key without jobs.
    fn remove_abandoned(&mut self, key: &K) {
        let Some(of_key) = self.keys.get_mut(key) else { return };
        let before = of_key.jobs.len();
        of_key.jobs.retain(|job| !(job.is_abandoned)());
        self.waiting = self.waiting.saturating_sub(before - of_key.jobs.len());
    }
}

/// The pool was dropped.
struct Closed;

/// Gives this thread the lowest priority. On Linux a nice value belongs to a thread.
fn lower_priority(name: &str) {
    if let Err(error) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE) {
        tracing::warn!(%error, "the threads `{name}` have the usual priority");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::mpsc;

    const OPTIONS: WorkPoolOptions = WorkPoolOptions {
        name: "work-pool-test",
        threads: 2,
        queue_max: 20,
        queue_per_key_max: 10,
        running_per_key_max: 1,
        on_idle: || {},
    };

    /// Occupies one thread until the sender is dropped. Returns when the job runs.
    async fn block<'p>(
        pool: &'p WorkPool<&'static str>,
        key: &'static str,
    ) -> (mpsc::Sender<()>, impl Future<Output = Result<(), WorkRefused>> + 'p) {
        let (release, released) = mpsc::channel::<()>();
        let (started, running) = oneshot::channel();
        let mut job = Box::pin(pool.run(key, move || {
            let _ = started.send(());
            let _ = released.recv();
        }));
        tokio::select! {
            _ = &mut job => {}
            _ = running => {}
        }
        (release, job)
    }

    #[tokio::test]
    async fn keys_have_turns_and_a_key_runs_a_part_of_the_threads_only() {
        let pool = WorkPool::start(OPTIONS).unwrap();
        let (release, blocked) = block(&pool, "greedy").await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |key: &'static str| {
            let order = order.clone();
            pool.run(key, move || order.lock().unwrap().push(key))
        };
        let greedy = futures_util::future::join_all((0..10).map(|_| note("greedy")));
        let modest = async {
            // The second thread is free, although the greedy key has ten jobs waiting.
            for _ in 0..5 {
                note("modest").await.unwrap();
            }
            assert!(!order.lock().unwrap().contains(&"greedy"));
            drop(release);
        };
        let (greedy, (), blocked) = tokio::join!(greedy, modest, blocked);
        assert!(greedy.iter().all(Result::is_ok) && blocked.is_ok());
        assert_eq!(order.lock().unwrap().len(), 15);
        // The thread notes the end of a job after its result was sent.
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while !pool.queue.lock().keys.is_empty() {
            assert!(std::time::Instant::now() < end, "a key without jobs is forgotten");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_full_pool_refuses_the_newest_job_of_the_key_with_the_most() {
        let options = WorkPoolOptions { threads: 1, queue_max: 4, queue_per_key_max: 4, ..OPTIONS };
        let pool = WorkPool::start(options).unwrap();
        let (release, blocked) = block(&pool, "first").await;
        let mut waiting: Vec<_> = (0..4).map(|n| Box::pin(pool.run("greedy", move || n))).collect();
        for job in &mut waiting {
            assert!(job.now_or_never().is_none());
        }
        let mut modest = Box::pin(pool.run("modest", || 7));
        assert!((&mut modest).now_or_never().is_none());
        assert_eq!(waiting.pop().unwrap().await, Err(WorkRefused::QueueFull));
        let mut second = Box::pin(pool.run("modest", || 8));
        assert!((&mut second).now_or_never().is_none());
        assert_eq!(waiting.pop().unwrap().await, Err(WorkRefused::QueueFull));
        assert_eq!(pool.run("modest", || 9).await, Err(WorkRefused::QueueFull), "both keys have two jobs");
        drop(release);
        assert_eq!(blocked.await, Ok(()));
        assert_eq!((modest.await, second.await), (Ok(7), Ok(8)));
        assert_eq!(futures_util::future::join_all(waiting).await, [Ok(0), Ok(1)]);
    }

    #[tokio::test]
    async fn a_full_queue_of_one_key_refuses_that_key_only() {
        let pool = WorkPool::start(OPTIONS).unwrap();
        let (release, blocked) = block(&pool, "greedy").await;
        let mut waiting: Vec<_> = (0..10).map(|_| Box::pin(pool.run("greedy", || {}))).collect();
        for job in &mut waiting {
            assert!(job.now_or_never().is_none());
        }
        assert_eq!(pool.run("greedy", || {}).await, Err(WorkRefused::CallerQueueFull));
        assert_eq!(pool.run("modest", || 7).await, Ok(7));
        waiting.pop();
        let mut replaced = Box::pin(pool.run("greedy", || {}));
        assert!((&mut replaced).now_or_never().is_none(), "a caller that stopped waiting makes room");
        drop(release);
        assert_eq!(blocked.await, Ok(()));
        assert_eq!(replaced.await, Ok(()));
    }

    #[tokio::test]
    async fn a_job_without_a_caller_does_not_run_and_one_that_panics_fails_alone() {
        let pool = WorkPool::start(WorkPoolOptions { threads: 1, ..OPTIONS }).unwrap();
        let (release, blocked) = block(&pool, "first").await;
        let has_run = Arc::new(Mutex::new(false));
        let run = has_run.clone();
        let mut abandoned = Box::pin(pool.run("second", move || *run.lock().unwrap() = true));
        assert!((&mut abandoned).now_or_never().is_none());
        drop(abandoned);
        drop(release);
        blocked.await.unwrap();
        assert_eq!(pool.run("third", || panic!("on purpose")).await, Err::<(), _>(WorkRefused::Failed));
        assert_eq!(pool.run("third", || 1).await, Ok(1));
        assert!(!*has_run.lock().unwrap());
    }

    #[tokio::test]
    async fn jobs_that_wait_fail_when_the_pool_ends() {
        let pool = WorkPool::start(WorkPoolOptions { threads: 1, ..OPTIONS }).unwrap();
        let queue = pool.queue.clone();
        let (sender, receiver) = oneshot::channel::<()>();
        queue.lock().is_closed = false;
        let refuse = Box::new(|_| {});
        let job = Job { run: Box::new(move || drop(sender)), refuse, is_abandoned: Box::new(|| false) };
        let (release, blocked) = block(&pool, "first").await;
        queue.push("second", job).unwrap();
        drop(blocked);
        drop(pool);
        assert!(receiver.await.is_err());
        drop(release);
    }
}
