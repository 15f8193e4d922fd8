//! Starts a process from its settings, and stops it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use admin::Administration;
use admin::keys::flow::claim_installation;
use http_kit::admission::caller_share::CallerShares;
use http_kit::admission::limit::RateLimits;
use http_kit::auth::{Authenticator, TenantRoutes, TokenVerifier};
use http_kit::{serve, web};
use pillarbox::consumers::{Replica, Runtime};
use pillarbox::database::Database;
use pillarbox::database::time::maintain;
use pillarbox::operations::confidential::Blanking;
use pillarbox::operations::maintenance;
use pillarbox::operations::status::LagGauges;
use relay::MessageSigner;
use runtime::clock::Clock;
use runtime::health::Health;
use runtime::secret::{MasterKey, Secret};
use runtime::telemetry::{self, PrometheusHandle};
use runtime::worker::{Round, RoundLimits, Wake, Worker};
use service::{RedisAddress, Role, Service, ServiceContext};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{self, api_description};
use crate::checks::Checks;
use crate::clock_check::ClockCheck;
use crate::message_bus::MessageBus;
use crate::pools::Pools;
use crate::server_routes::ServerState;
use crate::services::{self, BuiltService, ServiceList};
use crate::settings::{Bus, Settings};
use crate::start_error::StartError;

/// Time between two health checks of the dependencies.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
/// Time between two maintenance runs on the log: partitions and retention.
const MAINTAIN_PAUSE: Duration = Duration::from_secs(600);
/// Time between two checks whether the payloads of confidential messages are still needed.
const BLANK_PAUSE: Duration = Duration::from_secs(2);
/// Time between two measurements of the consumers' lag.
const LAG_PAUSE: Duration = Duration::from_secs(5);
/// Timeout of each step of a stop.
const STOP_STEP_TIME_MAX: Duration = Duration::from_secs(5);

/// A running process. Dropping it does not stop it; [`Running::stop`] does.
pub struct Running {
    pub address: SocketAddr,
    /// The first admin key, if this start created it. The caller must show it: only its hash is stored.
    pub first_admin_key: Option<Secret<String>>,
    stop: CancellationToken,
    server: TaskTracker,
    workers: Workers,
    runtime: Arc<Runtime>,
    service_tasks: TaskTracker,
    pools: Pools,
    checks: Arc<Checks>,
}

impl Running {
    /// Finishes the requests and batches in flight, then releases leases and connections.
    ///
    /// Every step has a timeout, so that an unresponsive server cannot block the stop.
    pub async fn stop(self) {
        self.stop.cancel();
        self.server.close();
        self.server.wait().await; // bounded by `drain_timeout_ms`
        self.workers.tasks.close();
        self.service_tasks.close();
        let (workers, services, consumers) =
            (self.workers.tasks.wait(), self.service_tasks.wait(), self.runtime.join());
        with_timeout("workers", async { tokio::join!(workers, services, consumers) }).await;
        with_timeout("health checks", self.checks.close()).await;
        with_timeout("database connections", self.pools.close()).await;
    }
}

async fn with_timeout<T>(step: &str, ending: impl Future<Output = T>) {
    if tokio::time::timeout(STOP_STEP_TIME_MAX, ending).await.is_err() {
        tracing::warn!(step, "did not stop in time; continuing without it");
    }
}

/// Starts the configured services and roles on a migrated database. `database` is PostgreSQL itself, as
/// [`check_reachable`](crate::pools::check_reachable) has verified. `master_keys`: the current key first.
///
/// Fails when a setting is invalid, the database cannot be reached or lacks migrations, an address that must be PostgreSQL
/// itself is that of a pooler, or the database belongs to another secret key. The first admin key is created by
/// the last step that can fail.
pub async fn start(
    settings: &Settings,
    services: ServiceList,
    listener: TcpListener,
    database: PgConnectOptions,
    master_keys: &[MasterKey],
) -> Result<Running, StartError> {
    services.iter().try_for_each(|entry| entry.check(settings))?;
    let clock = Clock::following();
    let pools = Pools::open(settings, &database).await?;
    pools.check_database(&services::migrations(services)).await?;
    let broker = settings.broker()?;
    let health = Health::default();
    let clock_check = ClockCheck::new(&pools.checks, &clock, &health);
    clock_check.run().await?;
    let metrics = telemetry::metrics()?;
    describe_metrics(services);
    let tokens = Arc::new(token_verifier(settings, &clock, master_keys)?);
    let context = service_context(settings, &pools, &clock, master_keys, tokens);
    let admin = Arc::new(Administration::build(&context, &admin_options(settings, services, &health))?);
    let checks = Arc::new(Checks::new(settings, &pools.checks, pools.pooler_checks.clone(), broker.clone(), &health)?);
    checks.run().await;
    let address = listener.local_addr().map_err(StartError::Listener)?;
    let built = services::build(services, &context, settings)?;
    let for_services = settings.bus == Bus::Rabbitmq;
    if broker.is_some() && settings.roles().contains(Role::Relay) {
        // Before a request can post something.
        relay::register_first_routes(&pools.workers, &settings.relay, for_services).await?;
    }
    // The last step that can fail: it may create the first admin key, which is lost unless the caller can show it.
    let installation = claim_installation(&pools.workers, master_keys, settings.admin_key.is_some()).await?;

    tokio::spawn(pools.clone().warm_up(settings.pool_min));
    let stop = CancellationToken::new();
    let workers = Workers { tasks: TaskTracker::new(), stop: stop.clone(), health: health.clone() };
    let limits = context.rate_limits.clone();
    workers.start_upkeep(Upkeep { checks: checks.clone(), clock_check, limits, metrics: metrics.clone() });
    let bus = broker.map(|broker| MessageBus { broker, signer: MessageSigner::new(master_keys) });
    let relay_bus = bus.as_ref().filter(|_| settings.roles().contains(Role::Relay));
    let runtime = Arc::new(start_runtime(settings, &pools, &context, &workers, relay_bus));
    if let Some(bus) = relay_bus {
        relay::start_queue_checks(&runtime, &settings.relay, &bus.broker, &bus.signer, for_services);
    }
    let with_admin: Vec<Arc<dyn BuiltService>> =
        [admin.clone() as _].into_iter().chain(built.iter().cloned()).collect();
    services::start_workers(&with_admin, settings, &runtime, bus.as_ref());
    workers.start_lag_measurement(pools.workers.clone());

    let authenticator = authenticator(settings, services, &context, &admin);
    let state = ServerState::new(&health, installation.id, metrics, move || api_description(services));
    let api = api::router(settings, state, admin, built, authenticator);
    let router = web::finish(api, settings.request_limits(), &health);
    let server = TaskTracker::new();
    server.spawn(serve::serve(listener, router, settings.serve_limits(), settings.proxies(), stop.clone()));
    let service_tasks = context.tasks().clone();
    let first_admin_key = installation.first_admin_key;
    Ok(Running { address, first_admin_key, stop, server, workers, runtime, service_tasks, pools, checks })
}

fn describe_metrics(services: ServiceList) {
    let of_services = services.iter().map(|service| service.metrics());
    [runtime::METRICS, http_kit::METRICS, pillarbox::METRICS, relay::METRICS]
        .into_iter()
        .chain(of_services)
        .for_each(telemetry::describe_metrics);
}

fn admin_options(settings: &Settings, services: ServiceList, health: &Health) -> admin::Options {
    admin::Options {
        admin_key: settings.admin_key.clone(),
        audit_days: settings.audit_days,
        change_wait: Duration::from_millis(settings.hub.change_wait_ms.into()),
        health: health.clone(),
        tenant_rows: services.iter().map(|service| service.delete_tenant_rows()).collect(),
        optional_routes: settings.relay.optional_routes(),
    }
}

fn authenticator(
    settings: &Settings,
    services: ServiceList,
    context: &ServiceContext,
    admin: &Administration,
) -> Authenticator {
    let tenant_routes = services.iter().flat_map(|service| service.tenant_routes().iter().copied());
    Authenticator {
        keys: admin.key_store(),
        tokens: context.token_verifier.clone(),
        limits: context.rate_limits.clone(),
        rate: settings.rate_limit(),
        tenant_routes: TenantRoutes::new(tenant_routes),
    }
}

fn token_verifier(settings: &Settings, clock: &Clock, master_keys: &[MasterKey]) -> Result<TokenVerifier, StartError> {
    // Issuers are other machines: their tokens expire by the clock of this one, not by the database's.
    let verifier = TokenVerifier::new(master_keys, &settings.issuers, clock.clone())?;
    let verifier = verifier.with_issuer_clock(Clock::system());
    Ok(match &settings.public_url {
        Some(address) => verifier.with_local_issuer(address),
        None => verifier,
    })
}

/// Starts the consumers' runtime and the work of the roles `maintain` and `relay` that belongs to no service.
fn start_runtime(
    settings: &Settings,
    pools: &Pools,
    context: &ServiceContext,
    workers: &Workers,
    relay_bus: Option<&MessageBus>,
) -> Runtime {
    let roles = settings.roles();
    if roles.contains(Role::Maintain) {
        workers.start_log_maintenance(settings, pools.workers.clone());
        workers.start_blanking(pools.workers.clone());
    }
    let replica = Replica::new(process_name(), settings.lease_time());
    // Commits over the pool for requests and over that for background work wake the same readers.
    let db = context.db.with_pool(pools.workers.clone());
    let runtime = Runtime::start(db, context.clock.clone(), replica, workers.health.clone(), workers.stop.clone())
        .with_local_handlers(context.local_handlers.clone());
    if let Some(bus) = relay_bus {
        let for_services = settings.bus == Bus::Rabbitmq;
        relay::start(&runtime, &settings.relay, &bus.broker, &bus.signer, for_services);
    }
    runtime
}

fn service_context(
    settings: &Settings,
    pools: &Pools,
    clock: &Clock,
    master_keys: &[MasterKey],
    tokens: Arc<TokenVerifier>,
) -> ServiceContext {
    let db = Database::new(pools.requests.clone())
        .with_statement_timeout(settings.pool_limits().statement_timeout)
        .with_admission(Arc::new(CallerShares::of_connections(pools.requests.options())));
    let redis = settings.redis_url.clone().map(|url| RedisAddress { url, prefix: settings.redis_prefix.clone() });
    let mut context = ServiceContext::new(db.clone(), clock.clone(), master_keys, tokens);
    if let Some(replica) = &pools.replica {
        context.read_db = db.with_pool(replica.clone());
    }
    context.redis = redis;
    context.retention = settings.retention();
    context.lease_time = settings.lease_time();
    context.has_embedded_database = settings.database_url.is_none();
    if let Some(address) = &settings.public_url {
        context.token_signer = context.token_signer.with_issuer(address);
    }
    context.public_url = settings.public_url.clone();
    context.smtp_url = settings.smtp_url.clone();
    context
}

/// Host name and process id. Operators see it as the name of a shard worker.
fn process_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    format!("{}:{}", host.as_deref().unwrap_or("unknown"), std::process::id())
}

/// The periodic tasks of the server itself.
struct Workers {
    tasks: TaskTracker,
    stop: CancellationToken,
    health: Health,
}

impl Workers {
    fn worker(&self, name: &str, pause: Duration, required: bool) -> Worker {
        Worker {
            name: name.to_owned(),
            pause,
            wake: Wake::default(),
            stop: self.stop.clone(),
            probe: self.health.task(name, required),
            limits: RoundLimits::default(),
        }
    }

    fn start_upkeep(&self, upkeep: Upkeep) {
        let worker = self.worker("upkeep", CHECK_PAUSE, true);
        self.tasks.spawn(async move { worker.run(|| upkeep.run_once()).await });
    }

    fn start_log_maintenance(&self, settings: &Settings, db: PgPool) {
        let worker = self.worker("maintain", MAINTAIN_PAUSE, false).with_limits(RoundLimits::LONG);
        let (retention, started_at) = (settings.retention(), Instant::now());
        self.tasks.spawn(async move {
            worker.run(|| maintain(&db, maintenance::run_once(&db, retention, started_at.elapsed()))).await;
        });
    }

    fn start_blanking(&self, db: PgPool) {
        let (worker, blanking) = (self.worker("blank", BLANK_PAUSE, false), Blanking::default());
        self.tasks.spawn(async move { worker.run(|| maintain(&db, blanking.run_once(&db))).await });
    }

    fn start_lag_measurement(&self, db: PgPool) {
        let (worker, gauges) = (self.worker("lag", LAG_PAUSE, false), LagGauges::default());
        self.tasks.spawn(async move { worker.run(|| measure_lag(&db, &gauges)).await });
    }
}

async fn measure_lag(db: &PgPool, gauges: &LagGauges) -> Result<Round, sqlx::Error> {
    gauges.update(db).await?;
    Ok(Round::Idle)
}

/// The periodic task of every process, whatever its roles.
struct Upkeep {
    checks: Arc<Checks>,
    clock_check: ClockCheck,
    limits: RateLimits,
    metrics: PrometheusHandle,
}

impl Upkeep {
    async fn run_once(&self) -> Result<Round, std::convert::Infallible> {
        tokio::join!(self.checks.run(), self.clock_check.run_in_time());
        self.metrics.run_upkeep();
        self.limits.drop_idle();
        Ok(Round::Idle)
    }
}
