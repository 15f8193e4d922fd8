//! What a process needs to work on the log: one watcher, one heartbeat, and lanes for each consumer.

use std::sync::Arc;
use std::time::Duration;

use kit::clock::Clock;
use kit::health::Health;
use kit::worker::{Round, Wake, Worker};
use sqlx::PgPool;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cursor::{Cursor, Kind, Start};
use crate::database::{self, PoolLimits};
use crate::filter::{Filter, Matching};
use crate::handler::{Handle, Handler};
use crate::home;
use crate::lane::{Lane, LaneOptions};
use crate::lease::Share;
use crate::replica::Replica;
use crate::retry::Retry;
use crate::watch::{self, Watcher};
use crate::work::{LaneError, Work};

/// A consumer with a handler. The same code whichever way its messages come.
pub struct Subscription {
    pub consumer: &'static str,
    /// The sources that it trusts, and the topics.
    pub matching: Matching,
    pub start: Start,
    pub handler: Arc<dyn Handler>,
}

/// How lanes are run.
#[derive(Debug, Clone, Copy)]
pub struct Rhythm {
    /// How many lanes: so many batches at once, each of other keys.
    pub lanes: u32,
    pub lane: LaneOptions,
    /// The longest that a lane waits when nothing wakes it.
    pub pause: Duration,
    /// Before the first round.
    pub delay: Duration,
}

impl Default for Rhythm {
    /// For handlers.
    fn default() -> Rhythm {
        let retry = Retry { retries: Some(3), first: Duration::from_secs(1), longest: Duration::from_secs(60) };
        Rhythm {
            lanes: 1,
            lane: LaneOptions { batch: 100, retry, in_step: false },
            pause: Duration::from_secs(1),
            delay: Duration::ZERO,
        }
    }
}

pub struct Runtime {
    db: PgPool,
    /// For the watcher and the heartbeat alone: a busy pool must not cost a process its leases.
    vital: PgPool,
    clock: Clock,
    watcher: Watcher,
    replica: Arc<Replica>,
    health: Health,
    stop: CancellationToken,
    lanes: TaskTracker,
    /// They go on until the lanes have ended.
    supports: TaskTracker,
    supports_stop: CancellationToken,
}

impl Runtime {
    /// Starts the watcher and the heartbeat.
    pub fn start(db: PgPool, clock: Clock, replica: Replica, health: Health, stop: CancellationToken) -> Runtime {
        let limits = PoolLimits { connections_min: 0, connections_max: 2, for_workers: true, ..PoolLimits::default() };
        let runtime = Runtime {
            vital: database::pool((*db.connect_options()).clone(), limits),
            db,
            clock,
            watcher: Watcher::default(),
            replica: Arc::new(replica),
            health,
            stop,
            lanes: TaskTracker::new(),
            supports: TaskTracker::new(),
            supports_stop: CancellationToken::new(),
        };
        let worker = |name: &str, pause, wake| Worker {
            name: name.to_owned(),
            pause,
            wake,
            stop: runtime.supports_stop.clone(),
            probe: runtime.health.task(name, true),
        };
        let (watching, db, watcher) =
            (worker("watcher", watch::PAUSE, runtime.watcher.wake()), runtime.vital.clone(), runtime.watcher.clone());
        runtime.supports.spawn(async move { watching.run(|| watcher.round(&db)).await });
        let (beating, db, replica, watcher) = (
            worker("heartbeat", runtime.replica.pause(), Wake::default()),
            runtime.vital.clone(),
            runtime.replica.clone(),
            runtime.watcher.clone(),
        );
        runtime.supports.spawn(async move { beating.run(|| beat(&db, &replica, &watcher)).await });
        runtime
    }

    /// To nudge after a post.
    pub fn watcher(&self) -> &Watcher {
        &self.watcher
    }

    /// A part in work that is shared out by shard, but does not read the log.
    pub fn share(&self, name: &'static str) -> Share {
        Share::new(name, self.replica.clone())
    }

    pub fn db(&self) -> &PgPool {
        &self.db
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Runs a consumer with a handler.
    pub fn subscribe(&self, subscription: &Subscription, rhythm: Rhythm) {
        let cursor = Cursor {
            consumer: subscription.consumer.to_owned(),
            kind: Kind::Handler,
            filter: Filter::matching(&subscription.matching),
            start: subscription.start,
        };
        self.consume(&cursor, rhythm, || Handle::new(subscription.handler.clone()));
    }

    /// Runs a consumer with work of any kind.
    pub fn consume<W: Work + 'static>(&self, cursor: &Cursor, rhythm: Rhythm, mut work: impl FnMut() -> W) {
        for number in 0..rhythm.lanes {
            let name = format!("{}/{number}", cursor.consumer);
            let probe = self.health.task(name.clone(), false);
            let (wake, stop) = (self.watcher.subscribe(), self.stop.clone());
            let worker = Worker { name, pause: rhythm.pause, wake, stop: stop.clone(), probe };
            let lane = Lane::new(
                self.db.clone(),
                cursor.clone(),
                rhythm.lane,
                self.replica.clone(),
                self.watcher.clone(),
                self.clock.clone(),
                work(),
            );
            self.lanes.spawn(async move {
                tokio::select! {
                    () = tokio::time::sleep(rhythm.delay) => {}
                    () = stop.cancelled() => return,
                }
                let lane = Mutex::new(lane);
                worker.run(async || lane.lock().await.round().await).await;
                if let Err(error) = lane.lock().await.leave().await {
                    tracing::warn!(%error, "leases are not given up; they end by themselves");
                }
            });
        }
    }

    /// Runs another task of this process until it is stopped; it ends before the heartbeat does.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.lanes.spawn(task);
    }

    pub fn worker(&self, name: String, pause: Duration) -> Worker {
        let probe = self.health.task(name.clone(), false);
        Worker { name, pause, wake: Wake::default(), stop: self.stop.clone(), probe }
    }

    /// Waits until the lanes have ended, and gives up what this process held. `stop` must be cancelled.
    pub async fn ended(&self) {
        self.lanes.close();
        self.lanes.wait().await;
        self.supports_stop.cancel();
        self.supports.close();
        self.supports.wait().await;
        if let Err(error) = self.replica.leave(&self.vital).await {
            tracing::warn!(%error, "leases are not given up; they end by themselves");
        }
        self.vital.close().await;
    }
}

/// A database that was restored makes this process unready.
async fn beat(db: &PgPool, replica: &Replica, watcher: &Watcher) -> Result<Round, LaneError> {
    // It may be the first to notice that the database was away.
    replica.beat(db).await.inspect_err(|_| watcher.doubt())?;
    match home::is_restored(&mut *db.acquire().await?).await? {
        true => Err(LaneError::Restored),
        false => Ok(Round::Idle),
    }
}
