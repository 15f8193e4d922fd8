//! The relay: routes out over one connection, queues in over one each.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kit::worker::{Round, Worker};
use mailbox::lane::LaneOptions;
use mailbox::retry::Retry;
use mailbox::runtime::{Rhythm, Runtime};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::bridge::{Bridge, IntakeQueue};
use crate::broker::{Broker, BrokerError};
use crate::route::{Carry, Route};
use crate::topology::{Binding, Queue, Topology};

/// How often the topology is looked after: a broker may come back without what it had.
const TOPOLOGY_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelaySettings {
    /// The longest that a route waits when nothing wakes it.
    pub poll_interval_ms: u32,
    /// How many messages are sent before their confirms are awaited.
    pub batch_size: u32,
    /// How long after the start the first message is sent.
    pub initial_delay_ms: u32,
    /// So many batches of a route at once, each of other keys.
    pub lanes: u32,
    /// Sends mails' events to their old exchange, too.
    pub enable_dual_publish: bool,
    /// In place of those that ship.
    pub routes: Vec<Route>,
    /// Besides what routes and intake need.
    pub topology: Topology,
    /// Queues to read into the log.
    pub intake: Vec<IntakeQueue>,
}

impl Default for RelaySettings {
    fn default() -> RelaySettings {
        let notifications = ["restaurant", "customer", "agency", "admin"].map(|of| Queue {
            name: format!("notification.{of}"),
            bindings: vec![Binding {
                exchange: "notifications.exchange".to_owned(),
                routing_key: format!("notification.{of}"),
            }],
            single_active_consumer: false,
        });
        RelaySettings {
            poll_interval_ms: 1_000,
            batch_size: 100,
            initial_delay_ms: 2_000,
            lanes: 2,
            enable_dual_publish: false,
            routes: Route::shipped(),
            topology: Topology { exchanges: Vec::new(), queues: notifications.to_vec() },
            intake: Vec::new(),
        }
    }
}

impl RelaySettings {
    /// What is wrong with them, if anything: the setting and what it takes.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        for (name, value, most) in [
            ("relay.poll_interval_ms", self.poll_interval_ms, 3_600_000),
            ("relay.batch_size", self.batch_size, 10_000),
            ("relay.lanes", self.lanes, 16),
        ] {
            if !(1..=most).contains(&value) {
                return Err((name, format!("takes a number from 1 to {most}")));
            }
        }
        let routes = self.routes();
        for (at, route) in routes.iter().enumerate() {
            route.check().map_err(|error| ("relay.routes", error))?;
            if routes[..at].iter().any(|earlier| earlier.name == route.name) {
                return Err(("relay.routes", format!("`{}` is there twice; a name takes one route", route.name)));
            }
        }
        self.intake.iter().try_for_each(IntakeQueue::check).map_err(|error| ("relay.intake", error))
    }

    fn routes(&self) -> Vec<Route> {
        let legacy = self.enable_dual_publish.then(Route::legacy);
        self.routes.iter().cloned().chain(legacy).collect()
    }

    /// What is to exist before anything is sent. Not the legacy exchange: it is its old owner's.
    fn topology(&self) -> Topology {
        let mut topology = self.topology.clone();
        for route in self.routes.iter().filter(|route| !route.exchange.is_empty()) {
            let exchange = route.exchange();
            if !topology.exchanges.contains(&exchange) {
                topology.exchanges.push(exchange);
            }
        }
        topology
    }
}

/// Starts a lane or more for each route.
pub fn start(runtime: &Runtime, settings: &RelaySettings, broker: &Arc<Broker>) {
    let routes = settings.routes();
    if settings.enable_dual_publish {
        let route = Route::legacy();
        tracing::warn!(
            exchange = route.exchange,
            "dual publish is on: mails' events also go to their old exchange; switch relay.enable_dual_publish off when \
             `pillarbox parity` shows that nobody needs it, or when event_publish_duration_seconds{{route=\"legacy\"}} \
             is above 0.1 s at p99"
        );
    }
    let rhythm = Rhythm {
        lanes: settings.lanes,
        lane: LaneOptions {
            batch: settings.batch_size,
            // What the broker does not take is kept for ever.
            retry: Retry { retries: None, first: Duration::from_secs(1), longest: Duration::from_secs(60) },
            in_step: false,
        },
        pause: Duration::from_millis(settings.poll_interval_ms.into()),
        delay: Duration::from_millis(settings.initial_delay_ms.into()),
    };
    keep_declared(runtime, settings.topology(), broker);
    for at in 0..routes.len() {
        let (route, told_returned) = (Arc::new(routes[at].clone()), Arc::<AtomicBool>::default());
        let carry = || Carry::new(route.clone(), broker.clone(), told_returned.clone());
        runtime.consume(&Route::cursor(&routes, at), rhythm, carry);
    }
    for queue in &settings.intake {
        start_intake(runtime, queue, broker);
    }
}

/// Reads a queue into the log. Over a connection of its own: a message that lapin cannot read ends the connection, again and
/// again until it is taken out, and may keep nobody else waiting.
pub fn start_intake(runtime: &Runtime, queue: &IntakeQueue, broker: &Arc<Broker>) {
    let worker: Worker = runtime.worker(format!("intake {}", queue.queue), Duration::from_millis(100));
    let broker = Arc::new(broker.apart());
    let bridge = Bridge::new(queue.clone(), broker.clone(), runtime);
    runtime.spawn(async move {
        let bridge = Mutex::new(bridge);
        worker.run(async || bridge.lock().await.round().await).await;
        bridge.into_inner().close().await;
        broker.close().await;
    });
}

/// Declares it, and again now and then.
pub(crate) fn keep_declared(runtime: &Runtime, topology: Topology, broker: &Arc<Broker>) {
    let (worker, broker) = (runtime.worker("topology".to_owned(), TOPOLOGY_PAUSE), broker.clone());
    runtime.spawn(async move { worker.run(async || declare(&topology, &broker).await).await });
}

async fn declare(topology: &Topology, broker: &Broker) -> Result<Round, BrokerError> {
    topology.declare(broker).await?;
    Ok(Round::Idle)
}
