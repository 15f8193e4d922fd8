//! The runtime of a process: one watcher, one heartbeat, and some shard workers for each consumer.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use runtime::backoff::Backoff;
use runtime::clock::Clock;
use runtime::health::{Health, Probe};
use runtime::worker::{Round, RoundLimits, Wake, Worker};
use sqlx::PgPool;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::consumer::{Consumer, ConsumerKind, StartAt};
use super::handler::{Handler, HandlerProcessor};
use super::leases::ShardAssignment;
use super::local_handlers::{LocalHandlers, LocalWorkerHandle};
use super::outcomes::Outcomes;
use super::processor::{ConsumerError, Processor};
use super::replica::Replica;
use super::retry::RetryPolicy;
use super::shard_worker::{ShardWorker, ShardWorkerOptions};
use crate::database::{self, Database, PoolLimits, SHORT_STEP_TIME_MAX, cluster_identity, is_no_response, step};
use crate::log::{Filter, MessagePattern, POLL_INTERVAL, Watcher};

/// The shortest time limit of a heartbeat.
const HEARTBEAT_TIME_MIN: Duration = Duration::from_secs(1);

/// A consumer with a handler. Its code is the same whether its messages come from the log or from a RabbitMQ queue.
pub struct Subscription {
    /// The name of the consumer.
    pub consumer: Cow<'static, str>,
    /// The sources that it trusts, and its topics.
    pub matching: MessagePattern,
    /// Where it starts when it is new.
    pub start: StartAt,
    /// Processes the messages.
    pub handler: Arc<dyn Handler>,
    /// Batch size, retry policy and number of shard workers.
    pub options: ConsumerOptions,
}

impl Subscription {
    /// Returns the consumer that runs the handler.
    pub(crate) fn to_consumer(&self) -> Consumer {
        Consumer {
            name: self.consumer.clone().into_owned(),
            kind: ConsumerKind::Handler,
            filter: Filter::matching(&self.matching),
            start: self.start,
        }
    }
}

/// How a process runs a consumer.
#[derive(Debug, Clone, Copy)]
pub struct ConsumerOptions {
    /// The number of shard workers: this many batches are processed concurrently, each with different keys.
    pub workers: u32,
    /// How each shard worker reads and retries.
    pub worker: ShardWorkerOptions,
    /// The longest time that an idle shard worker waits without being woken.
    pub pause: Duration,
    /// The delay before the first round.
    pub delay: Duration,
}

impl Default for ConsumerOptions {
    /// The options for handlers.
    fn default() -> ConsumerOptions {
        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let retry = RetryPolicy { retries: Some(3), backoff };
        ConsumerOptions {
            workers: 1,
            worker: ShardWorkerOptions { batch: 100, retry, in_log_order: false },
            pause: Duration::from_secs(1),
            delay: Duration::ZERO,
        }
    }
}

/// The consumers of a process, and what they share.
pub struct Runtime {
    db: Database,
    /// For the watcher and the heartbeat alone: a busy pool must not cost a process its leases.
    vital_db: PgPool,
    clock: Clock,
    watcher: Watcher,
    replica: Arc<Replica>,
    local_handlers: LocalHandlers,
    health: Health,
    stop: CancellationToken,
    workers: TaskTracker,
    /// The watcher and the heartbeat, which run until the workers have ended.
    vital_tasks: TaskTracker,
    vital_stop: CancellationToken,
}

impl Runtime {
    /// Starts the watcher, which each commit of `db` wakes, and the heartbeat.
    pub fn start(db: Database, clock: Clock, replica: Replica, health: Health, stop: CancellationToken) -> Runtime {
        let limits = PoolLimits { connections_min: 0, connections_max: 2, for_workers: true, ..PoolLimits::default() };
        let runtime = Runtime {
            vital_db: database::pool((*db.pool().connect_options()).clone(), limits),
            watcher: Watcher::new(db.readers().clone(), db.invalidations().clone()),
            db,
            clock,
            replica: Arc::new(replica),
            local_handlers: LocalHandlers::default(),
            health,
            stop,
            workers: TaskTracker::new(),
            vital_tasks: TaskTracker::new(),
            vital_stop: CancellationToken::new(),
        };
        let vital = |name: &str, pause, wake| Worker {
            name: name.to_owned(),
            pause,
            wake,
            stop: runtime.vital_stop.clone(),
            probe: runtime.health.task(name, true),
            limits: RoundLimits::default(),
        };
        let worker = vital("watcher", POLL_INTERVAL, runtime.db.readers().clone());
        let (db, watcher) = (runtime.vital_db.clone(), runtime.watcher.clone());
        let silence = SilenceDetector::new(runtime.health.clone(), runtime.db.pool().clone());
        runtime.vital_tasks.spawn(async move { worker.run(|| silence.observe(watcher.round(&db))).await });

        let worker = vital("heartbeat", runtime.replica.heartbeat_interval(), Wake::default());
        let (db, replica, watcher) = (runtime.vital_db.clone(), runtime.replica.clone(), runtime.watcher.clone());
        runtime.vital_tasks.spawn(async move { worker.run(|| heartbeat(&db, &replica, &watcher)).await });
        runtime
    }

    /// Registers the handlers that are started from now on there, so that requests of this process can wait for them.
    pub fn with_local_handlers(self, local_handlers: LocalHandlers) -> Runtime {
        Runtime { local_handlers, ..self }
    }

    /// Creates the assignment of shards for work that is divided by shard but does not read the log.
    pub fn shard_assignment(&self, name: &'static str) -> ShardAssignment {
        ShardAssignment::new(name, self.replica.clone(), self.watcher.clone())
    }

    /// Returns the database over the pool for background work.
    pub fn db(&self) -> &Database {
        &self.db
    }

    /// Returns the clock of the process.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Runs a consumer with a handler.
    pub fn subscribe(&self, subscription: &Subscription) {
        let consumer = subscription.to_consumer();
        let processor = || HandlerProcessor::new(subscription.handler.clone());
        let local = || Some(self.local_handlers.register(consumer.filter.clone()));
        self.start_shard_workers(&consumer, subscription.options, processor, local);
    }

    /// Runs a consumer with a processor of any kind.
    pub fn consume<P: Processor + 'static>(
        &self,
        consumer: &Consumer,
        options: ConsumerOptions,
        processor: impl FnMut() -> P,
    ) {
        self.start_shard_workers(consumer, options, processor, || None);
    }

    /// `local` registers a shard worker as the handler of this process, if it is one.
    fn start_shard_workers<P: Processor + 'static>(
        &self,
        consumer: &Consumer,
        options: ConsumerOptions,
        mut processor: impl FnMut() -> P,
        local: impl Fn() -> Option<LocalWorkerHandle>,
    ) {
        Outcomes::register_counters(consumer);
        for number in 0..options.workers {
            let name = format!("{}/{number}", consumer.name);
            let probe = self.health.task(name.clone(), false);
            let (wake, stop) = (self.watcher.subscribe(), self.stop.clone());
            let limits = RoundLimits::STEPS;
            let worker = Worker { name, pause: options.pause, wake, stop: stop.clone(), probe, limits };
            let shard_worker = ShardWorker::new(
                &self.db,
                consumer.clone(),
                options.worker,
                self.replica.clone(),
                self.watcher.clone(),
                self.clock.clone(),
                processor(),
            )
            .with_local_handle(local());
            let name = consumer.name.clone();
            self.workers.spawn(async move {
                tokio::select! {
                    () = tokio::time::sleep(options.delay) => {}
                    () = stop.cancelled() => return,
                }
                let shard_worker = Mutex::new(shard_worker);
                worker.run(async || shard_worker.lock().await.round().await).await;
                if let Err(error) = shard_worker.lock().await.release().await {
                    tracing::warn!(
                        consumer = name, %error, "could not release the leases of a consumer; they expire by themselves"
                    );
                }
            });
        }
    }

    /// Runs another task of this process until it is stopped. The heartbeat continues until the task has ended.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.workers.spawn(task);
    }

    /// Returns a worker for another task of this process; see [`Runtime::spawn`].
    pub fn worker(&self, name: String, pause: Duration) -> Worker {
        let probe = self.health.task(name.clone(), false);
        let limits = RoundLimits::default();
        Worker { name, pause, wake: Wake::default(), stop: self.stop.clone(), probe, limits }
    }

    /// Registers something without which the process is unready. It counts as met until it is reported as down.
    pub fn requirement(&self, name: String) -> Probe {
        self.health.task(name, true)
    }

    /// Registers a server that a service uses besides PostgreSQL. Without it, the process is degraded and not unready.
    pub fn dependency(&self, name: &str) -> Probe {
        self.health.dependency(name, false)
    }

    /// Returns the token that is cancelled when the process stops.
    pub fn stop_token(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Waits until the workers have ended, and releases the leases of this process. `stop` must be cancelled.
    pub async fn join(&self) {
        self.workers.close();
        self.workers.wait().await;
        self.vital_stop.cancel();
        self.vital_tasks.close();
        self.vital_tasks.wait().await;
        if let Err(error) = self.replica.remove(&self.vital_db).await {
            tracing::warn!(%error, "could not remove this process from the database; its leases expire by themselves");
        }
        self.vital_db.close().await;
    }
}

/// Distinguishes dead connections from a slow database: a poll of the watcher, which takes milliseconds, got no response at
/// all, and the next one, over a new connection, gets one at once.
struct SilenceDetector {
    health: Health,
    /// The pool for background work. Its connections probably die with that of the watcher.
    workers: PgPool,
    had_no_response: AtomicBool,
}

impl SilenceDetector {
    /// A poll over a new connection that takes longer shows that the database is slow.
    const PROMPT: Duration = Duration::from_millis(2_500);

    fn new(health: Health, workers: PgPool) -> SilenceDetector {
        SilenceDetector { health, workers, had_no_response: AtomicBool::new(false) }
    }

    async fn observe<T>(&self, poll: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
        let began = Instant::now();
        let result = poll.await;
        let had_no_response = match &result {
            Err(error) if is_no_response(error) => {
                database::close_idle(&self.workers);
                true
            }
            // No connection could be opened, so it is still unknown whether the old one was dead.
            Err(_) => self.had_no_response.load(Ordering::Relaxed),
            Ok(_) => false,
        };
        let was_silent = self.had_no_response.swap(had_no_response, Ordering::Relaxed);
        if result.is_ok() && was_silent && began.elapsed() < SilenceDetector::PROMPT {
            database::close_idle(&self.workers);
            self.health.announce_lost_connections();
        }
        result
    }
}

/// Sends a heartbeat. Fails, and thereby makes the process unready, if the database was restored.
async fn heartbeat(db: &PgPool, replica: &Replica, watcher: &Watcher) -> Result<Round, ConsumerError> {
    // A heartbeat that is repeated too late would cost the leases.
    let time_max = replica.heartbeat_interval().clamp(HEARTBEAT_TIME_MIN, SHORT_STEP_TIME_MAX);
    // The heartbeat may be the first to lose its connection: no worker follows the last snapshot then. Whether transactions were
    // lost is decided by the incarnation that the next snapshot finds.
    let heartbeat = step(db, "heartbeat", time_max, replica.heartbeat(db)).await;
    heartbeat.inspect_err(|_| watcher.drop_snapshot())?;
    let checking = async { cluster_identity::is_restored(&mut *db.acquire().await?).await };
    let is_restored = step(db, "cluster identity", SHORT_STEP_TIME_MAX, checking).await?;
    if is_restored { Err(ConsumerError::Restored) } else { Ok(Round::Idle) }
}
