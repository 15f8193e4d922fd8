//! Starts the relay: the routes over one shared connection, and each intake queue over its own connection.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use chrono::{DateTime, Utc};
use kit::backoff::Backoff;
use kit::worker::{Round, RoundLimits, Worker};
use mailbox::consumers::{ConsumerOptions, RetryPolicy, Runtime, ShardWorkerOptions};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::sync::Mutex;

use crate::broker::{Broker, BrokerError};
use crate::former_routes;
use crate::intake_queue::{IntakeFormat, IntakeQueue};
use crate::intake_worker::{IntakeWorker, Trust};
use crate::route::Route;
use crate::route_processor::RouteProcessor;
use crate::signature::MessageSigner;
use crate::topology::Topology;
use crate::type_queues;

/// The pause between two declarations of the topology: a broker may lose its objects in a restart.
pub(crate) const TOPOLOGY_PAUSE: Duration = Duration::from_secs(60);

/// The settings of the relay (table `relay`).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelaySettings {
    /// How long an idle route waits without a wake-up, in milliseconds.
    pub poll_interval_ms: u32,
    /// The largest number of messages that are sent before their confirms are awaited.
    pub batch_size: u32,
    /// The delay between the start of the process and the first message, in milliseconds.
    pub initial_delay_ms: u32,
    /// The number of shard workers per route in this process. Each sends its own batches, of different keys.
    pub workers: u32,
    /// Whether e-mail messages are published to their old exchange, too.
    pub enable_dual_publish: bool,
    /// The routes. They replace the default routes.
    #[serde(deserialize_with = "kit::config::list")]
    pub routes: Vec<Route>,
    /// Exchanges and queues besides those of the routes and of the intake.
    pub topology: Topology,
    /// The queues that are read into the log.
    #[serde(deserialize_with = "kit::config::list")]
    pub intake: Vec<IntakeQueue>,
    /// Until then, services accept messages without a signature, as relays of an earlier version publish them.
    #[serde(deserialize_with = "optional_time")]
    pub accept_unsigned_until: Option<DateTime<Utc>>,
}

fn optional_time<'de, D: Deserializer<'de>>(value: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let parse =
        |text: String| text.parse().map_err(|_| D::Error::custom("must be a time such as 2026-12-31T00:00:00Z"));
    Option::<String>::deserialize(value)?.map(parse).transpose()
}

impl Default for RelaySettings {
    fn default() -> RelaySettings {
        RelaySettings {
            poll_interval_ms: 1_000,
            batch_size: 100,
            initial_delay_ms: 2_000,
            workers: 2,
            enable_dual_publish: false,
            routes: Route::defaults(),
            topology: Topology::default(),
            intake: Vec::new(),
            accept_unsigned_until: None,
        }
    }
}

impl RelaySettings {
    /// Checks the values. Fails with the name of the invalid setting and the values it accepts.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        for (name, value, max) in [
            ("relay.poll_interval_ms", self.poll_interval_ms, 3_600_000),
            ("relay.batch_size", self.batch_size, 10_000),
            ("relay.workers", self.workers, 16),
        ] {
            if !(1..=max).contains(&value) {
                return Err((name, format!("must be a number from 1 to {max}")));
            }
        }
        let routes = self.routes();
        for (at, route) in routes.iter().enumerate() {
            route.check().map_err(|error| ("relay.routes", error))?;
            if routes[..at].iter().any(|earlier| earlier.name == route.name) {
                return Err((
                    "relay.routes",
                    format!("the name `{}` is used twice; every route needs its own name", route.name),
                ));
            }
        }
        self.intake.iter().try_for_each(IntakeQueue::check).map_err(|error| ("relay.intake", error))
    }

    /// Returns the route of addresses, the configured routes, and the legacy route if dual publishing is on.
    pub(crate) fn routes(&self) -> Vec<Route> {
        let legacy = self.enable_dual_publish.then(|| Route::legacy(&self.routes));
        [Route::contacts()].into_iter().chain(self.routes.iter().cloned()).chain(legacy).collect()
    }

    /// Returns the objects that must exist before the first message is sent. The legacy exchange is not among them,
    /// because another application owns it.
    fn topology(&self) -> Topology {
        let mut topology = self.topology.clone();
        [Route::contacts()].iter().chain(&self.routes).for_each(|route| topology.add_exchange(route.exchange()));
        topology
    }
}

/// Starts the topology worker, the shard workers of all routes, and the intake of all configured queues. `for_services`: the
/// services of this installation read queues.
pub fn start(
    runtime: &Runtime,
    settings: &RelaySettings,
    broker: &Arc<Broker>,
    signer: &MessageSigner,
    for_services: bool,
) {
    let routes = settings.routes();
    if settings.enable_dual_publish {
        let route = Route::legacy(&settings.routes);
        tracing::warn!(
            exchange = route.exchange,
            "dual publishing is on: e-mail messages are published to their old exchange, too; set \
             relay.enable_dual_publish to false when `pillarbox parity` shows that no consumer needs it, or when \
             event_publish_duration_seconds{{route=\"legacy\"}} is above 0.1 s at p99"
        );
    }
    let options = ConsumerOptions {
        workers: settings.workers,
        worker: ShardWorkerOptions {
            batch: settings.batch_size,
            // A message that the broker does not accept is retried for ever.
            retry: RetryPolicy {
                retries: None,
                backoff: Backoff::new(Duration::from_secs(1), Duration::from_secs(60)),
            },
            in_log_order: false,
        },
        pause: Duration::from_millis(settings.poll_interval_ms.into()),
        delay: Duration::from_millis(settings.initial_delay_ms.into()),
    };
    start_topology_worker(runtime, settings.topology(), broker);
    type_queues::start(runtime, &settings.routes, broker);
    former_routes::start(runtime, &routes);
    for at in (0..routes.len()).filter(|at| for_services || !routes[*at].services_only) {
        let (route, logged_unroutable) = (Arc::new(routes[at].clone()), Arc::<AtomicBool>::default());
        let processor =
            || RouteProcessor::new(route.clone(), broker.clone(), signer.clone(), logged_unroutable.clone());
        runtime.consume(&Route::consumer(&routes, at), options, processor);
    }
    for queue in &settings.intake {
        let trust = match queue.format {
            IntakeFormat::Json => None,
            // What our own relay has published to the old exchange has the id of its event. Programs that know nothing of
            // signatures publish there, too.
            IntakeFormat::Email => Some(Trust::of_all(signer.clone())),
        };
        start_intake_with(runtime, queue, broker, trust);
    }
}

/// Starts reading a queue of other programs into the log.
pub fn start_intake(runtime: &Runtime, queue: &IntakeQueue, broker: &Arc<Broker>) {
    start_intake_with(runtime, queue, broker, None);
}

/// Starts reading a queue into the log, over its own connection: a message that lapin cannot decode ends the
/// connection repeatedly until it is removed from the queue, which must not affect others.
pub(crate) fn start_intake_with(runtime: &Runtime, queue: &IntakeQueue, broker: &Arc<Broker>, trust: Option<Trust>) {
    let worker: Worker = runtime.worker(format!("intake {}", queue.queue), Duration::from_millis(100));
    let worker = worker.with_limits(RoundLimits::STEPS);
    let broker = Arc::new(broker.separate_connection());
    let intake = IntakeWorker::new(queue.clone(), trust, broker.clone(), runtime);
    runtime.spawn(async move {
        let intake = Mutex::new(intake);
        worker.run(async || intake.lock().await.round().await).await;
        intake.into_inner().close().await;
        broker.close().await;
    });
}

/// Starts a worker that declares the topology, at once and then periodically.
pub(crate) fn start_topology_worker(runtime: &Runtime, topology: Topology, broker: &Arc<Broker>) {
    // Each request to the broker has a time limit, and there can be many of them.
    let worker = runtime.worker("topology".to_owned(), TOPOLOGY_PAUSE).with_limits(RoundLimits::STEPS);
    let broker = broker.clone();
    runtime.spawn(async move { worker.run(async || declare(&topology, &broker).await).await });
}

async fn declare(topology: &Topology, broker: &Broker) -> Result<Round, BrokerError> {
    topology.declare(broker).await?;
    Ok(Round::Idle)
}
