//! Starts a process from its settings, and stops it.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use kit::auth::{Authenticator, TenantRoutes, TokenVerifier};
use kit::clock::Clock;
use kit::config::InvalidSetting;
use kit::health::Health;
use kit::limit::RateLimits;
use kit::page::CursorKey;
use kit::secret::{MasterKey, Secret};
use kit::telemetry::{self, PrometheusHandle};
use kit::worker::{Round, RoundLimits, Wake, Worker};
use kit::{serve, web};
use mailbox::consumers::{LocalHandlers, Replica, Runtime};
use mailbox::database::Database;
use mailbox::database::pooler::PoolerError;
use mailbox::database::time::maintain;
use mailbox::operations::confidential::Blanking;
use mailbox::operations::maintenance;
use mailbox::operations::status::LagGauges;
use mailbox::service::{RedisAddress, Role, ServiceContext, cursor_key};
use relay::{Broker, MessageSigner};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::audit::{self, AuditTrail};
use crate::checks::Checks;
use crate::clock_check::ClockCheck;
use crate::keys::cache::KeyCache;
use crate::keys::flow::claim_installation;
use crate::overview::OverviewCache;
use crate::pools::Pools;
use crate::rate_exchange::RateExchange;
use crate::services::{self, ServiceList};
use crate::settings::{Bus, Settings};
use crate::tenants::flow::{Propagation, adopt, remove_deleted};
use crate::{api, keys, portal_tokens};

/// Time between two health checks of the dependencies.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
/// Time between two maintenance runs on the log: partitions and retention.
const MAINTAIN_PAUSE: Duration = Duration::from_secs(600);
/// Time between two checks whether the payloads of confidential messages are still needed.
const BLANK_PAUSE: Duration = Duration::from_secs(2);
/// Time between two removals of old audit lines, expired portal tokens and deleted tenants.
const REMOVE_PAUSE: Duration = Duration::from_secs(60);
/// Time between two exchanges of the demands on shared rate limits.
const RATE_PAUSE: Duration = Duration::from_secs(1);
/// Time between two measurements of the consumers' lag.
const LAG_PAUSE: Duration = Duration::from_secs(5);
/// Timeout of each step of a stop.
const STOP_STEP_TIME_MAX: Duration = Duration::from_secs(5);

/// The state of the platform's own HTTP handlers.
#[derive(Clone)]
pub struct App {
    pub(crate) db: Database,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) keys: KeyCache,
    pub(crate) local_handlers: LocalHandlers,
    pub(crate) health: Health,
    pub(crate) metrics: PrometheusHandle,
    pub(crate) propagation: Propagation,
    pub(crate) overview: OverviewCache,
    services: ServiceList,
    description: Arc<OnceLock<Bytes>>,
}

impl App {
    /// The OpenAPI description as JSON; rendered once.
    pub(crate) fn description(&self) -> Bytes {
        // A description always serializes: it consists of strings, lists and maps with strings as keys.
        let render = || Bytes::from(api::api_description(self.services).to_json().unwrap_or_default());
        self.description.get_or_init(render).clone()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    #[error("setting `issuers`: {0}")]
    Issuer(#[from] kit::auth::InvalidIssuer),
    #[error(transparent)]
    Telemetry(#[from] telemetry::TelemetryError),
    #[error("the database lacks the migrations {0:?}: run `pillarbox migrate` with the same settings")]
    NotMigrated(Vec<i64>),
    #[error(
        "the database at {address} cannot be reached: {cause}; check that it is running and that {setting} is correct"
    )]
    Unreachable {
        setting: &'static str,
        address: String,
        #[source]
        cause: sqlx::Error,
    },
    #[error(
        "{0} is the address of a pooler, which assigns another session to each transaction: set it to PostgreSQL itself. Only \
         requests can go through a pooler: set database_url to the pooler and database_direct_url to PostgreSQL itself"
    )]
    Pooled(&'static str),
    #[error(transparent)]
    Pooler(#[from] PoolerError),
    #[error("the address of the HTTP server cannot be determined: {0}; restart the process")]
    Listener(#[source] std::io::Error),
    #[error(
        "the database failed during the start: {0}; `pillarbox status` shows whether it can be reached and is migrated"
    )]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Keys(#[from] keys::Error),
}

/// RabbitMQ, and the signatures of the messages that services exchange over it.
#[derive(Clone)]
pub(crate) struct MessageBus {
    pub(crate) broker: Arc<Broker>,
    pub(crate) signer: MessageSigner,
}

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
    pools.check_database().await?;
    let broker = settings.broker()?;
    let health = Health::default();
    let clock_check = ClockCheck::new(&pools.checks, &clock, &health);
    clock_check.run().await?;
    let app = app_state(settings, services, &pools, &clock, master_keys, &health)?;
    let authenticator = authenticator(settings, &app, master_keys)?;
    let checks = Arc::new(Checks::new(settings, &pools.checks, pools.pooler_checks.clone(), broker.clone(), &health)?);
    checks.run().await;
    let address = listener.local_addr().map_err(StartError::Listener)?;
    let mut context = service_context(settings, &pools, &app, master_keys, authenticator.tokens.clone());
    context.rate_limits = authenticator.limits.clone();
    let built = services::build(services, &context, settings)?;
    adopt(&pools.workers).await?;
    // The last step that can fail: it may create the first admin key, which is lost unless the caller can show it.
    let has_admin_key = settings.admin_key.is_some();
    let first_admin_key = claim_installation(&pools.workers, master_keys, has_admin_key).await?;

    tokio::spawn(pools.clone().warm_up(settings.pool_min));
    let stop = CancellationToken::new();
    let workers = Workers { tasks: TaskTracker::new(), stop: stop.clone(), health: health.clone() };
    workers.start_upkeep(Upkeep {
        checks: checks.clone(),
        clock_check,
        limits: authenticator.limits.clone(),
        metrics: app.metrics.clone(),
    });
    let bus = broker.map(|broker| MessageBus { broker, signer: MessageSigner::new(master_keys) });
    let runtime = Arc::new(start_runtime(settings, &pools, &app, &workers, bus.as_ref()));
    services::start_workers(&built, settings, &runtime, bus.as_ref());
    workers.start_lag_measurement(pools.workers.clone());
    if settings.roles().contains(Role::Api) {
        workers.start_rate_exchange(RateExchange::new(authenticator.limits.clone(), pools.workers.clone()));
    }

    let (audit_trail, write_audit_trail) = AuditTrail::new(pools.requests.clone(), app.clock.clone());
    context.spawn(write_audit_trail);
    let api = api::router(settings, app, built, authenticator, audit_trail);
    let router = web::finish(api, settings.request_limits(), &health);
    let server = TaskTracker::new();
    server.spawn(serve::serve(listener, router, settings.serve_limits(), settings.proxies(), stop.clone()));
    let service_tasks = context.tasks().clone();
    Ok(Running { address, first_admin_key, stop, server, workers, runtime, service_tasks, pools, checks })
}

fn app_state(
    settings: &Settings,
    services: ServiceList,
    pools: &Pools,
    clock: &Clock,
    master_keys: &[MasterKey],
    health: &Health,
) -> Result<App, StartError> {
    let statement_timeout = settings.pool_limits().statement_timeout;
    let db = Database::new(pools.requests.clone()).with_statement_timeout(statement_timeout);
    let keys = KeyCache::new(pools.requests.clone(), settings.admin_key.as_ref());
    let dropped = keys.clone();
    db.on_invalidation(move || dropped.clear());
    let metrics = telemetry::metrics()?;
    let of_services = services.iter().map(|service| service.metrics());
    [mailbox::METRICS, relay::METRICS].into_iter().chain(of_services).for_each(telemetry::describe_metrics);
    Ok(App {
        db,
        clock: clock.clone(),
        cursor_key: cursor_key(master_keys),
        keys,
        local_handlers: LocalHandlers::default(),
        health: health.clone(),
        metrics,
        propagation: Propagation {
            lease_time: settings.lease_time(),
            time_max: Duration::from_millis(settings.hub.change_wait_ms.into()),
            own_processes: 1,
        },
        overview: OverviewCache::default(),
        services,
        description: Arc::default(),
    })
}

fn authenticator(settings: &Settings, app: &App, master_keys: &[MasterKey]) -> Result<Authenticator, StartError> {
    Ok(Authenticator {
        keys: Arc::new(app.keys.clone()),
        tokens: Arc::new(token_verifier(settings, app, master_keys)?),
        limits: RateLimits::default(),
        rate: settings.rate_limit(),
        tenant_routes: TenantRoutes::new(
            app.services.iter().flat_map(|service| service.tenant_routes().iter().copied()),
        ),
    })
}

fn token_verifier(settings: &Settings, app: &App, master_keys: &[MasterKey]) -> Result<TokenVerifier, StartError> {
    // Issuers are other machines: their tokens expire by the clock of this one, not by the database's.
    let verifier = TokenVerifier::new(master_keys, &settings.issuers, app.clock.clone())?;
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
    app: &App,
    workers: &Workers,
    bus: Option<&MessageBus>,
) -> Runtime {
    let roles = settings.roles();
    if roles.contains(Role::Maintain) {
        workers.start_log_maintenance(settings, pools.workers.clone());
        workers.start_blanking(pools.workers.clone());
        workers.start_removal(settings.audit_days, app.services, pools.workers.clone());
    }
    let replica = Replica::new(process_name(), settings.lease_time());
    // Commits over the pool for requests and over that for background work wake the same readers.
    let db = app.db.with_pool(pools.workers.clone());
    let runtime = Runtime::start(db, app.clock.clone(), replica, workers.health.clone(), workers.stop.clone())
        .with_local_handlers(app.local_handlers.clone());
    if let (true, Some(bus)) = (roles.contains(Role::Relay), bus) {
        let for_services = settings.bus == Bus::Rabbitmq;
        relay::start(&runtime, &settings.relay, &bus.broker, &bus.signer, for_services);
    }
    runtime
}

fn service_context(
    settings: &Settings,
    pools: &Pools,
    app: &App,
    master_keys: &[MasterKey],
    tokens: Arc<TokenVerifier>,
) -> ServiceContext {
    let redis = settings.redis_url.clone().map(|url| RedisAddress { url, prefix: settings.redis_prefix.clone() });
    let mut context = ServiceContext::new(app.db.clone(), app.clock.clone(), master_keys, tokens);
    context.read_db = pools.reads.clone();
    context.redis = redis;
    context.local_handlers = app.local_handlers.clone();
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

/// The periodic tasks of the platform itself.
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

    fn start_removal(&self, audit_days: u32, services: ServiceList, db: PgPool) {
        let worker = self.worker("tenants", REMOVE_PAUSE, false).with_limits(RoundLimits::LONG);
        self.tasks.spawn(async move { worker.run(|| maintain(&db, remove_old(&db, audit_days, services))).await });
    }

    fn start_rate_exchange(&self, exchange: RateExchange) {
        let worker = self.worker("rate limits", RATE_PAUSE, false);
        self.tasks.spawn(async move {
            worker.run(|| exchange.round()).await;
            if let Err(error) = exchange.end().await {
                tracing::debug!(%error, "the demands of this process remain for some seconds");
            }
        });
    }

    fn start_lag_measurement(&self, db: PgPool) {
        let (worker, gauges) = (self.worker("lag", LAG_PAUSE, false), LagGauges::default());
        self.tasks.spawn(async move { worker.run(|| measure_lag(&db, &gauges)).await });
    }
}

/// Removes what has expired: audit lines, portal tokens, what deleted tenants still have, and finally their names.
async fn remove_old(db: &PgPool, audit_days: u32, services: ServiceList) -> Result<Round, sqlx::Error> {
    portal_tokens::flow::remove_expired(db).await?;
    let (audit, tenants) = (audit::remove_old(db, audit_days).await?, remove_deleted(db, services).await?);
    Ok(if audit == Round::Busy { audit } else { tenants })
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
