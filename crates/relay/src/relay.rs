//! Starts the relay: the routes over one shared connection, and each intake queue over its own connection.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pillarbox::consumers::{
    Consumer, ConsumerKind, ConsumerOptions, RetryPolicy, Runtime, ShardWorkerOptions, StartAt,
};
use runtime::backoff::Backoff;
use runtime::config::List;
use runtime::worker::{RoundLimits, Wake, Worker};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sqlx::PgPool;
use tokio::sync::Mutex;

use crate::broker::Broker;
use crate::intake_queue::{IntakeFormat, IntakeQueue};
use crate::intake_worker::{IntakeError, IntakeWorker, Trust};
use crate::route::Route;
use crate::route_processor::RouteProcessor;
use crate::signature::MessageSigner;
use crate::topology::{TOPOLOGY_PAUSE, Topology, declare};
use crate::type_queues;

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
    /// Whether e-mail messages are also published to their old exchange.
    pub enable_dual_publish: bool,
    /// Which of the default routes `notifications` and `email` are on with `bus = "postgres"`, where no service reads their
    /// queues.
    #[serde(deserialize_with = "runtime::config::list")]
    pub enable_routes: Vec<String>,
    /// The routes. They replace the default routes.
    #[serde(serialize_with = "configured_routes", deserialize_with = "routes")]
    pub routes: Vec<Route>,
    /// Exchanges and queues besides those of the routes and of the intake.
    pub topology: Topology,
    /// The queues that are read into the log.
    #[serde(deserialize_with = "runtime::config::list")]
    pub intake: Vec<IntakeQueue>,
}

/// The default routes are null, so that settings which were merged with their defaults tell them from routes that an operator
/// has configured with the same values.
fn configured_routes<S: Serializer>(routes: &[Route], serializer: S) -> Result<S::Ok, S::Error> {
    let configured = (routes != Route::defaults()).then_some(routes);
    configured.serialize(serializer)
}

fn routes<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<Route>, D::Error> {
    let configured = Option::<List<Route>>::deserialize(value)?;
    Ok(configured.map_or_else(Route::defaults, |List(routes)| routes))
}

impl Default for RelaySettings {
    fn default() -> RelaySettings {
        RelaySettings {
            poll_interval_ms: 1_000,
            batch_size: 100,
            initial_delay_ms: 2_000,
            workers: 2,
            enable_dual_publish: false,
            enable_routes: Vec::new(),
            routes: Route::defaults(),
            topology: Topology::default(),
            intake: Vec::new(),
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
            route.check().map_err(|error| ("relay.routes", error.to_string()))?;
            if routes[..at].iter().any(|earlier| earlier.name == route.name) {
                return Err((
                    "relay.routes",
                    format!("the name `{}` is used twice; every route needs its own name", route.name),
                ));
            }
        }
        let can_be_off =
            |name: &String| Route::defaults().iter().any(|one| one.is_default_for_readers() && one.name == *name);
        if let Some(name) = self.enable_routes.iter().find(|name| !can_be_off(name)) {
            let accepted = "notifications and email are accepted; other routes are always on".to_owned();
            return Err(("relay.enable_routes", format!("`{name}` is not a default route that is off: {accepted}")));
        }
        self.intake.iter().try_for_each(IntakeQueue::check).map_err(|error| ("relay.intake", error.to_string()))
    }

    /// Returns the route of addresses, the configured routes, and the legacy route if dual publishing is on.
    pub(crate) fn routes(&self) -> Vec<Route> {
        let legacy = self.enable_dual_publish.then(|| Route::legacy(&self.routes));
        [Route::contacts()].into_iter().chain(self.routes.iter().cloned()).chain(legacy).collect()
    }

    /// Whether the route publishes. `for_services`: the services of this installation read queues.
    pub(crate) fn is_on(&self, route: &Route, for_services: bool) -> bool {
        let is_enabled = self.enable_routes.contains(&route.name);
        for_services || !(route.services_only || (route.is_default_for_readers() && !is_enabled))
    }

    /// Returns the consumers of the default routes that are off, because no service reads their queues.
    pub fn routes_without_reader(&self, for_services: bool) -> Vec<String> {
        let is_off = |route: &&Route| !self.is_on(route, for_services);
        self.routes.iter().filter(is_off).map(Route::consumer_name).collect()
    }

    /// Returns the consumers of the default routes to which no queue has to be bound. What is unrouted there was not asked for.
    pub fn optional_routes(&self) -> Vec<String> {
        let is_optional = |route: &&Route| route.is_default && !route.required;
        self.routes.iter().filter(is_optional).map(Route::consumer_name).collect()
    }

    /// Returns the routes that publish.
    fn routes_on(&self, for_services: bool) -> Vec<Route> {
        self.routes().into_iter().filter(|route| self.is_on(route, for_services)).collect()
    }

    /// Returns the consumers of the routes that publish.
    fn consumers(&self, for_services: bool) -> Vec<(Route, Consumer)> {
        let routes = self.routes();
        let on = (0..routes.len()).filter(|at| self.is_on(&routes[*at], for_services));
        on.map(|at| {
            let mut consumer = Route::consumer(&routes, at);
            // Handlers that have read the log until now continue with the queues, and drop what they have processed.
            if for_services && routes[at].is_default_for_readers() {
                consumer.start = StartAt::Beginning;
            }
            (routes[at].clone(), consumer)
        })
        .collect()
    }

    /// Returns the objects that must exist before the first message is sent. The legacy exchange is not among them,
    /// because another application owns it.
    fn topology(&self, for_services: bool) -> Topology {
        let mut topology = self.topology.clone();
        let declared = [Route::contacts()].into_iter().chain(self.routes.iter().cloned());
        let on = declared.filter(|route| self.is_on(route, for_services));
        on.for_each(|route| topology.add_exchange(route.exchange()));
        topology
    }
}

/// Registers the routes of an installation that has had none. They start with what is posted from now on, also before the relay
/// itself has started, and not with the whole log. `for_services`: the services of this installation read queues, so that they
/// need what was posted before.
pub async fn register_first_routes(db: &PgPool, settings: &RelaySettings, for_services: bool) -> sqlx::Result<()> {
    if for_services {
        return Ok(());
    }
    let consumers: Vec<Consumer> = settings.consumers(for_services).into_iter().map(|(_, consumer)| consumer).collect();
    Consumer::register_first(db, ConsumerKind::Relay, &consumers).await
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
    if settings.enable_dual_publish {
        let route = Route::legacy(&settings.routes);
        tracing::warn!(
            exchange = route.exchange,
            "dual publishing is on: e-mail messages are also published to their old exchange; set \
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
    start_topology_worker(runtime, settings.topology(for_services), broker);
    type_queues::start(runtime, &settings.routes_on(for_services), broker);
    for (route, consumer) in settings.consumers(for_services) {
        let (route, logged_unroutable) = (Arc::new(route), Arc::<AtomicBool>::default());
        let processor =
            || RouteProcessor::new(route.clone(), broker.clone(), signer.clone(), logged_unroutable.clone());
        runtime.consume(&consumer, options, processor);
    }
    for queue in &settings.intake {
        let trust = match queue.format {
            IntakeFormat::Json => None,
            // What our own relay has published to the old exchange has the id of its event. Programs that know nothing of
            // signatures also publish there.
            IntakeFormat::Email => Some(Trust::of_all(signer.clone())),
        };
        start_intake_with(runtime, queue, broker, trust, Wake::default());
    }
}

/// Starts reading a queue of other programs into the log.
pub fn start_intake(runtime: &Runtime, queue: &IntakeQueue, broker: &Arc<Broker>) {
    start_intake_with(runtime, queue, broker, None, Wake::default());
}

/// Starts reading a queue into the log, over its own connection: a message that ends the connection must not affect others.
/// `topology`: wakes the worker that declares the queue, when RabbitMQ does not deliver from it.
pub(crate) fn start_intake_with(
    runtime: &Runtime,
    queue: &IntakeQueue,
    broker: &Arc<Broker>,
    trust: Option<Trust>,
    topology: Wake,
) {
    let worker: Worker = runtime.worker(format!("intake {}", queue.queue), Duration::from_millis(100));
    let worker = worker.with_limits(RoundLimits::STEPS);
    let broker = Arc::new(broker.separate_connection());
    let intake = IntakeWorker::new(queue.clone(), trust, broker.clone(), runtime);
    runtime.spawn(async move {
        let intake = Mutex::new(intake);
        let round = async || {
            let round = intake.lock().await.round().await;
            if let Err(IntakeError::Broker(_)) = &round {
                topology.wake();
            }
            round
        };
        worker.run(round).await;
        intake.into_inner().close().await;
        broker.close().await;
    });
}

/// Starts a worker that declares the topology, at once and then periodically.
fn start_topology_worker(runtime: &Runtime, topology: Topology, broker: &Arc<Broker>) {
    // Each request to the broker has a time limit, and there can be many of them.
    let worker = runtime.worker("topology".to_owned(), TOPOLOGY_PAUSE).with_limits(RoundLimits::STEPS);
    let broker = broker.clone();
    runtime.spawn(async move {
        let known = Mutex::new(Vec::new());
        worker.run(async || declare(&topology, &broker, &mut *known.lock().await).await).await;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(settings: &RelaySettings, for_services: bool) -> Vec<String> {
        settings.routes_on(for_services).into_iter().map(|route| route.name).collect()
    }

    #[test]
    fn routes_without_readers_are_off_unless_a_setting_turns_them_on() {
        let mut settings = RelaySettings::default();
        assert_eq!(on(&settings, false), ["smap", "dead-letters", "default"]);
        assert_eq!(settings.routes_without_reader(false), ["relay.notifications", "relay.email"]);
        assert_eq!(on(&settings, true), ["contacts", "notifications", "email", "smap", "dead-letters", "default"]);
        assert!(settings.topology(false).exchanges.iter().all(|one| one.name != "notifications.exchange"));
        settings.enable_routes = vec!["email".to_owned()];
        assert_eq!(on(&settings, false), ["email", "smap", "dead-letters", "default"]);
        settings.enable_routes = vec!["smap".to_owned()];
        let (name, error) = settings.check().unwrap_err();
        assert!(name == "relay.enable_routes" && error.contains("notifications and email"), "{error}");
        // What an operator has configured is on.
        let own = Route { sources: vec!["identity".to_owned()], required: true, ..Route::new("email", "mails") };
        let settings = RelaySettings { routes: vec![own], ..RelaySettings::default() };
        assert_eq!(on(&settings, false), ["email"]);
    }

    #[test]
    fn a_configured_route_is_on_also_if_it_equals_a_default_one() {
        let default = serde_json::to_value(RelaySettings::default()).unwrap();
        assert!(default["routes"].is_null(), "{default}");
        let load = |routes: serde_json::Value| -> RelaySettings {
            let mut settings = default.clone();
            settings["routes"] = routes;
            serde_json::from_value(settings).unwrap()
        };
        assert_eq!(on(&load(serde_json::Value::Null), false), ["smap", "dead-letters", "default"]);
        let email = Route::defaults().into_iter().find(|route| route.name == "email");
        assert_eq!(on(&load(serde_json::json!([email])), false), ["email"]);
    }
}
