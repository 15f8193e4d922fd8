//! One process of a program: its handlers, and the upkeep of the log.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use runtime::clock::Clock;
use runtime::health::{Health, State};
use runtime::worker::RoundLimits;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::consumers::{Consumer, ConsumerOptions, Processor, Replica, Runtime, StartAt, Subscription};
use crate::database::time::maintain;
use crate::database::{self, Database, MigrationId, Migrations, PoolLimits, cluster_identity, missing_migrations};
use crate::handler::{Handle, Typed};
use crate::log::MessagePattern;
use crate::message::{FromLog, Message};
use crate::operations::confidential::Blanking;
use crate::operations::maintenance::{self, Retention};

/// The pause between two rounds of maintenance.
const MAINTAIN_PAUSE: Duration = Duration::from_secs(600);
/// The pause between two rounds that blank confidential messages.
const BLANK_PAUSE: Duration = Duration::from_secs(2);

/// Starts one consumer.
type Start = Box<dyn FnOnce(&Runtime) + Send>;

/// A process that handles messages. Any number of processes with the same handlers can run at the same time: they share the work.
///
/// Besides its handlers it runs the upkeep of the log: partitions, retention, and the snapshots from which consumers read.
/// Programs that only post need none of it; their database needs one process that does.
///
/// ```no_run
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct OrderPaid { order: i64 }
/// # impl pillarbox::Message for OrderPaid { const TOPIC: &str = "order.paid"; }
/// use pillarbox::{Pillarbox, Tx};
///
/// async fn write_invoice(tx: &mut Tx, order: OrderPaid) -> Result<(), sqlx::Error> {
///     sqlx::query("insert into public.invoice (order_id) values ($1)").bind(order.order).execute(&mut **tx).await?;
///     Ok(())
/// }
///
/// #[tokio::main]
/// async fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let pool = sqlx::PgPool::connect("postgres://localhost/shop").await?;
///     let stop = async { drop(tokio::signal::ctrl_c().await) };
///     Pillarbox::new(pool).handler("invoices", write_invoice).run(stop).await?;
///     Ok(())
/// }
/// ```
#[must_use = "it does nothing until it is run"]
pub struct Pillarbox {
    pool: PgPool,
    name: String,
    connections_max: u32,
    lease_time: Duration,
    retention: Retention,
    consumers: Vec<Consumer>,
    starts: Vec<Start>,
}

/// The process could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The schema is older than this version of the library.
    #[error(
        "the database lacks migrations of this version of pillarbox ({}): call `pillarbox::database::migrate` before the start, \
         or run `pillarbox migrate`", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    NotMigrated(Vec<MigrationId>),
    /// The database cannot be reached, or refuses.
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl Pillarbox {
    /// Handles messages of the database of this pool. The process opens a separate pool there, because its sessions need
    /// settings that must not depend on those of the caller's.
    pub fn new(pool: PgPool) -> Pillarbox {
        Pillarbox {
            pool,
            name: format!("pid {}", std::process::id()),
            connections_max: 5,
            lease_time: Duration::from_secs(15),
            retention: Retention::default(),
            consumers: Vec::new(),
            starts: Vec::new(),
        }
    }

    /// Sets the name of this process, which operators see beside the shards that it works on. By default its process id.
    pub fn name(self, name: impl Into<String>) -> Pillarbox {
        Pillarbox { name: name.into(), ..self }
    }

    /// Sets how many connections handlers may use. Two more are for the upkeep. By default 5.
    pub fn connections_max(self, connections_max: u32) -> Pillarbox {
        Pillarbox { connections_max, ..self }
    }

    /// Sets how long another process waits until it takes over the work of this one when it is killed. By default 15 s. A
    /// process that stops hands its work over at once.
    pub fn lease_time(self, lease_time: Duration) -> Pillarbox {
        Pillarbox { lease_time, ..self }
    }

    /// Sets how long messages are retained. By default a week, and longer for a consumer that is behind.
    pub fn retention(self, retention: Retention) -> Pillarbox {
        Pillarbox { retention, ..self }
    }

    /// Adds a handler. The name is that of its consumer: its progress is stored under it, so it must not change. A new consumer
    /// starts with the messages that are posted from then on. A failed message is retried three times, within about 7 s.
    pub fn handler<M: FromLog + 'static>(
        self,
        consumer: impl Into<Cow<'static, str>>,
        handler: impl Handle<M>,
    ) -> Pillarbox {
        self.handler_with(consumer, StartAt::Now, ConsumerOptions::default(), handler)
    }

    /// The same with options: where a new consumer starts, and how messages are retried.
    pub fn handler_with<M: FromLog + 'static>(
        self,
        consumer: impl Into<Cow<'static, str>>,
        start: StartAt,
        options: ConsumerOptions,
        handler: impl Handle<M>,
    ) -> Pillarbox {
        let matching = MessagePattern {
            sources: vec![M::Message::SOURCE.to_owned()],
            topics: vec![M::Message::TOPIC.to_owned()],
            aggregate_types: Vec::new(),
        };
        let handler = Arc::new(Typed::<_, M>::new(handler));
        self.subscription(Subscription { consumer: consumer.into(), matching, start, handler, options })
    }

    /// Adds a handler of messages of several types, which it gets as they are in the log.
    pub fn subscription(mut self, subscription: Subscription) -> Pillarbox {
        self.consumers.push(subscription.to_consumer());
        self.starts.push(Box::new(move |runtime| runtime.subscribe(&subscription)));
        self
    }

    /// Adds a consumer that sends messages elsewhere. `processor` makes the processor of each of its workers.
    pub fn processor<P: Processor + 'static>(
        mut self,
        consumer: Consumer,
        options: ConsumerOptions,
        processor: impl FnMut() -> P + Send + 'static,
    ) -> Pillarbox {
        self.consumers.push(consumer.clone());
        self.starts.push(Box::new(move |runtime| runtime.consume(&consumer, options, processor)));
        self
    }

    /// Runs until `stop` completes. Then it finishes the batches in progress and hands its shards over.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), StartError> {
        let running = self.start().await?;
        stop.await;
        running.stop().await;
        Ok(())
    }

    /// Starts, and returns when the consumers are registered: from then on they get every message.
    pub async fn start(self) -> Result<Running, StartError> {
        let options = (*self.pool.connect_options()).clone();
        let limits = PoolLimits {
            connections_min: 0,
            connections_max: self.connections_max,
            for_workers: true,
            ..PoolLimits::default()
        };
        let pool = database::pool(options, limits);
        let missing = missing_migrations(&pool, &Migrations::default()).await?;
        if !missing.is_empty() {
            return Err(StartError::NotMigrated(missing));
        }
        cluster_identity::check(&pool).await?;
        for consumer in &self.consumers {
            consumer.register(&pool).await?;
        }
        let (health, stop) = (Health::default(), CancellationToken::new());
        let db = Database::new(pool.clone()).with_statement_timeout(limits.statement_timeout);
        let replica = Replica::new(self.name, self.lease_time);
        let runtime = Runtime::start(db.clone(), Clock::system(), replica, health.clone(), stop.clone());
        start_maintenance(&runtime, self.retention);
        self.starts.into_iter().for_each(|start| start(&runtime));
        Ok(Running { runtime, db, health, stop })
    }
}

fn start_maintenance(runtime: &Runtime, retention: Retention) {
    let started_at = Instant::now();
    let worker = runtime.worker("maintain".to_owned(), MAINTAIN_PAUSE).with_limits(RoundLimits::LONG);
    let db = runtime.db().pool().clone();
    runtime.spawn(async move {
        worker.run(|| maintain(&db, maintenance::run_once(&db, retention, started_at.elapsed()))).await;
    });
    let (worker, blanking) = (runtime.worker("blank".to_owned(), BLANK_PAUSE), Blanking::default());
    let db = runtime.db().pool().clone();
    runtime.spawn(async move { worker.run(|| maintain(&db, blanking.run_once(&db))).await });
}

/// A process that runs. Dropping it does not stop it.
pub struct Running {
    runtime: Runtime,
    db: Database,
    health: Health,
    stop: CancellationToken,
}

impl Running {
    /// The database, whose commits wake the handlers of this process at once. Commits over other pools are noticed within
    /// 100 ms.
    pub fn database(&self) -> &Database {
        &self.db
    }

    /// What the process depends on and what it does, and what is wrong with it. It can do no work while a required one is down.
    pub fn health(&self) -> Vec<State> {
        self.health.report()
    }

    /// Finishes the batches in progress, and hands the shards over.
    pub async fn stop(self) {
        self.stop.cancel();
        self.runtime.join().await;
        self.db.pool().close().await;
    }
}
