//! From settings to a running server, and back down.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::{Router, middleware};
use events::{Events, Stores};
use hub::Hub;
use joins::Joins;
use kit::auth::{Gate, TokenVerifier, pass_gate};
use kit::clock::Clock;
use kit::config::BadSetting;
use kit::health::Health;
use kit::limit::RateLimit;
use kit::page::CursorKey;
use kit::secret::{MasterKey, Seal, Secret};
use kit::telemetry::PrometheusHandle;
use kit::worker::{Round, Wake, Worker};
use kit::{openapi, serve, telemetry, web};
use mailbox::database::{self, PoolLimits};
use mailbox::pooler::{self, BadPooler};
use mailbox::replica::Replica;
use mailbox::runtime::Runtime;
use mailbox::{home, maintain, status};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection, PgPool};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::checks::Checks;
use crate::keys::flow::settle_installation;
use crate::keys::ring::KeyRing;
use crate::settings::{Role, Settings};
use crate::{edges, keys, operator, services};

/// How often dependencies are looked at.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
/// How often the log's partitions are looked after.
const MAINTAIN_PAUSE: Duration = Duration::from_secs(600);
/// How often consumers' lag is measured.
const LAG_PAUSE: Duration = Duration::from_secs(5);
/// How long each part may take to end.
const STEP_TIME_MAX: Duration = Duration::from_secs(5);

/// What handlers share.
#[derive(Clone)]
pub struct App {
    pub(crate) db: PgPool,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) keys: KeyRing,
    pub(crate) health: Health,
    pub(crate) metrics: PrometheusHandle,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Setting(#[from] BadSetting),
    #[error("setting `issuers`: {0}")]
    Issuer(#[from] kit::auth::BadIssuer),
    #[error(transparent)]
    Telemetry(#[from] telemetry::TelemetryError),
    #[error("the database lacks migrations {0:?}: run `pillarbox migrate` with the same settings")]
    NotMigrated(Vec<i64>),
    #[error("the database at {place} cannot be reached: {cause}; is it running, and is {setting} right?")]
    Unreachable {
        setting: &'static str,
        place: String,
        #[source]
        cause: sqlx::Error,
    },
    #[error(
        "{0} leads to a pooler, which hands out another session for each transaction: give PostgreSQL itself there. Requests \
         alone can go through a pooler: database_url leads to it then, and database_direct_url to PostgreSQL itself"
    )]
    Pooled(&'static str),
    #[error(transparent)]
    Pooler(#[from] BadPooler),
    #[error("the database: {0}")]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Keys(#[from] keys::Error),
}

/// A server that runs. Dropping it does not stop it; [`Running::stop`] does.
pub struct Running {
    pub address: SocketAddr,
    /// The first admin key, if this start made it: to be shown, once.
    pub first_admin_key: Option<Secret<String>>,
    stop: CancellationToken,
    serving: TaskTracker,
    workers: TaskTracker,
    runtime: Runtime,
    db: PgPool,
    feed_db: PgPool,
    work_db: PgPool,
    checks: Arc<Checks>,
}

impl Running {
    /// Finishes what is in flight, then lets go of everything.
    ///
    /// Every step is bounded: a server that hangs must not keep this one from ending.
    pub async fn stop(self) {
        self.stop.cancel();
        self.serving.close();
        self.serving.wait().await; // bounded by the drain time
        self.workers.close();
        let (workers, consumers) = (self.workers.wait(), self.runtime.ended());
        bounded("workers", async { tokio::join!(workers, consumers) }).await;
        bounded("checks", self.checks.close()).await;
        bounded("database connections", async {
            tokio::join!(self.db.close(), self.feed_db.close(), self.work_db.close())
        })
        .await;
    }
}

async fn bounded<T>(what: &str, ending: impl Future<Output = T>) {
    if tokio::time::timeout(STEP_TIME_MAX, ending).await.is_err() {
        tracing::warn!(what, "did not end in time; left behind");
    }
}

/// Starts the roles that the settings name on a migrated database, which [`reach`] has found to be PostgreSQL itself.
/// `master_keys`: the current one first.
pub async fn start(
    settings: &Settings,
    listener: TcpListener,
    database: PgConnectOptions,
    master_keys: &[MasterKey],
) -> Result<Running, StartError> {
    let clock = Clock::system();
    let pooler = settings.pooler()?;
    if let Some(pooler) = &pooler {
        connect("database_url", pooler).await?;
        pooler::check(pooler, &settings.pool_limits()).await?;
    }
    let for_requests = |limits| match &pooler {
        Some(pooler) => database::pool_behind_pooler(pooler.clone(), limits),
        None => database::pool(database.clone(), limits),
    };
    let db = for_requests(settings.pool_limits());
    // Apart, so that requests and work in the background do not starve each other.
    let work_limits = PoolLimits {
        connections_min: 0,
        connections_max: settings.worker_pool_max,
        for_workers: true,
        ..settings.pool_limits()
    };
    let work_db = database::pool(database.clone(), work_limits);
    let missing = database::missing_migrations(&work_db).await?;
    if !missing.is_empty() {
        return Err(StartError::NotMigrated(missing));
    }
    if pooler.is_some() {
        pooler::check_same(&db, &work_db).await?;
    }
    home::settle(&work_db).await?;
    let broker = settings.broker()?;
    let health = Health::default();
    let app = App {
        db: db.clone(),
        clock: clock.clone(),
        cursor_key: CursorKey::new(master_keys.iter().map(|key| key.derive("page cursor")).collect()),
        keys: KeyRing::new(db.clone(), clock.clone(), settings.admin_key.as_ref()),
        health: health.clone(),
        metrics: telemetry::metrics()?,
    };
    let gate = Gate {
        keys: Arc::new(app.keys.clone()),
        tokens: Arc::new(TokenVerifier::new(master_keys, &settings.issuers, clock)?),
        rate_limit: settings.rate_limit().map(RateLimit::per_second),
    };
    // A connection of its own: a pool that is busy is not a database that is away.
    let alone = PoolLimits { connections_min: 0, connections_max: 1, ..settings.pool_limits() };
    let checked_pooler = pooler.as_ref().map(|_| for_requests(alone));
    let checked = database::pool(database.clone(), alone);
    let checks = Arc::new(Checks::new(settings, &checked, checked_pooler, broker.clone(), &health)?);
    checks.run().await;
    let address = listener.local_addr().map_err(sqlx::Error::Io)?;
    // Last of what can fail: it may make the first admin key, which is shown only if we get to show it.
    let now = app.clock.now();
    let first_admin_key = settle_installation(&work_db, master_keys, settings.admin_key.is_some(), now).await?;

    tokio::spawn(warm(db.clone(), settings.pool_min));
    let stop = CancellationToken::new();
    let (serving, workers) = (TaskTracker::new(), TaskTracker::new());
    let worker = |name: &str, pause, required| Worker {
        name: name.to_owned(),
        pause,
        wake: Wake::default(),
        stop: stop.clone(),
        probe: health.task(name, required),
    };
    let upkeep = worker("upkeep", CHECK_PAUSE, true);
    let upkeeping =
        Upkeep { checks: checks.clone(), rate_limit: gate.rate_limit.clone(), metrics: app.metrics.clone() };
    workers.spawn(async move { upkeep.run(|| upkeeping.round()).await });
    if settings.has_role(Role::Maintain) {
        let (maintaining, db, clock) = (worker("maintain", MAINTAIN_PAUSE, false), work_db.clone(), app.clock.clone());
        let (keep, since) = (settings.keep(), Instant::now());
        let round = move || {
            let (db, now) = (db.clone(), clock.now());
            async move { maintain::round(&db, keep, now, since.elapsed()).await }
        };
        workers.spawn(async move { maintaining.run(round).await });
    }
    let replica = Replica::new(process_name(), settings.lease_time());
    let runtime = Runtime::start(work_db.clone(), app.clock.clone(), replica, health.clone(), stop.clone());
    if let (true, Some(broker)) = (settings.has_role(Role::Relay), &broker) {
        relay::start(&runtime, &settings.relay, broker);
    }
    let sealing = Seal::new(&master_keys[0], &master_keys[1..], "hub secrets");
    let (hub, taking) = Hub::new(
        db.clone(),
        app.clock.clone(),
        app.cursor_key.clone(),
        sealing,
        settings.webhook_client()?,
        runtime.watcher().clone(),
        settings.hub.export.clone(),
    );
    workers.spawn(taking);
    if settings.has_service("hub") {
        hub.start(&runtime, settings.has_role(Role::Fanout), settings.has_role(Role::Dispatch));
        if settings.has_role(Role::Maintain) {
            hub.maintain(&runtime, settings.keep(), &settings.hub);
        }
    }
    let feed_db = match settings.replica()? {
        // One that is away now may be there later.
        Some(replica) if matches!(pooler::is_pooler(&replica).await, Ok(true)) => {
            return Err(StartError::Pooled("replica_url"));
        }
        Some(replica) => database::pool(replica, PoolLimits { connections_min: 0, ..settings.pool_limits() }),
        None => db.clone(),
    };
    let redis = settings.redis_client()?.map(|client| (client, settings.redis_prefix.clone()));
    let stores = Stores { db: db.clone(), feed_db: feed_db.clone(), redis };
    let (events, reading) = Events::new(stores, app.clock.clone(), app.cursor_key.clone(), runtime.watcher().clone());
    workers.spawn(reading);
    let (joins, settling) = Joins::new(db.clone(), app.clock.clone(), app.cursor_key.clone(), runtime.watcher());
    workers.spawn(settling);
    let mut subscriptions = Vec::new();
    if settings.has_service("events") {
        subscriptions.extend(events.subscriptions());
        if settings.has_role(Role::Maintain) {
            events.maintain(&runtime, &settings.events);
        }
    }
    if settings.has_service("joins") {
        subscriptions.extend(joins.subscriptions());
        if settings.has_role(Role::Maintain) {
            joins.maintain(&runtime);
        }
    }
    services::subscribe(settings, &runtime, broker.as_ref(), subscriptions);
    let (measuring, measured) = (worker("lag", LAG_PAUSE, false), work_db.clone());
    workers.spawn(async move { measuring.run(|| measure(&measured)).await });

    let router = web::finish(router(settings, app, (hub, events, joins), gate), settings.request_limits());
    serving.spawn(serve::serve(listener, router, settings.serve_limits(), stop.clone()));
    Ok(Running { address, first_admin_key, stop, serving, workers, runtime, db, feed_db, work_db, checks })
}

/// Which machine and process, for people.
fn process_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    format!("{}:{}", host.as_deref().unwrap_or("unknown"), std::process::id())
}

async fn measure(db: &PgPool) -> Result<Round, sqlx::Error> {
    status::measure(db).await?;
    Ok(Round::Idle)
}

/// Fails unless it is PostgreSQL itself.
pub(crate) async fn reach(settings: &Settings, database: &PgConnectOptions) -> Result<(), StartError> {
    let setting = settings.database_setting();
    connect(setting, database).await?;
    // The private one is known.
    if settings.database_url.is_some() && pooler::is_pooler(database).await? {
        return Err(StartError::Pooled(setting));
    }
    Ok(())
}

/// Fails with the cause; a pool would only say that it waited.
async fn connect(setting: &'static str, database: &PgConnectOptions) -> Result<(), StartError> {
    match PgConnection::connect_with(database).await {
        Ok(connection) => Ok(connection.close().await?),
        Err(cause) => {
            let place = match database.get_socket() {
                Some(folder) => folder.display().to_string(),
                None => format!("{}:{}", database.get_host(), database.get_port()),
            };
            Err(StartError::Unreachable { setting, place, cause })
        }
    }
}

/// Opens the connections that the pool keeps: a lazy pool opens none before it is asked.
async fn warm(db: PgPool, connections: u32) {
    // Held together and then let go: taken one by one, it would be the same one each time.
    let held = futures_util::future::join_all((0..connections).map(|_| db.acquire())).await;
    drop(held);
}

/// What every process does beside its roles.
struct Upkeep {
    checks: Arc<Checks>,
    rate_limit: Option<RateLimit>,
    metrics: PrometheusHandle,
}

impl Upkeep {
    async fn round(&self) -> Result<Round, std::convert::Infallible> {
        self.checks.run().await;
        self.metrics.run_upkeep();
        if let Some(limit) = &self.rate_limit {
            limit.forget_quiet();
        }
        Ok(Round::Idle)
    }
}

fn router(settings: &Settings, app: App, (hub, events, joins): (Hub, Events, Joins), gate: Gate) -> Router {
    let mut router = Router::from(edges::router().with_state(app.clone()));
    if settings.has_role(Role::Api) {
        let mut api = Router::from(api().with_state(app));
        if settings.has_service("hub") {
            api = api.merge(Router::from(hub::router().with_state(Arc::new(hub))));
        }
        if settings.has_service("events") {
            api = api.merge(Router::from(events::router().with_state(Arc::new(events))));
        }
        if settings.has_service("joins") {
            api = api.merge(Router::from(joins::router().with_state(Arc::new(joins))));
        }
        router = router.merge(api.layer(middleware::from_fn_with_state(gate, pass_gate)));
    }
    router
}

/// Every route that needs to know who is calling.
fn api() -> OpenApiRouter<App> {
    keys::http::router().merge(operator::http::router())
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Pillarbox",
        description = "A reliable event platform on PostgreSQL. Errors are problems (RFC 9457).",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "server", description = "Is it alive, and what does it depend on? Open to all."),
        (name = "admin", description = "API keys. Needs the role `admin`: by a key, or by an operator's token."),
        (name = "operator", description = "The log and its consumers. Needs the role `admin` in the tenant `main`."),
        (name = "hub", description = "Webhooks. To post events takes a key with the role `ingest`, the rest `manage`; \
                                      each sees its own tenant."),
        (name = "events", description = "Events. To read what is published is open to all; the rest takes a user's token."),
        (name = "joins", description = "Registrations. Takes a user's token; what is for organizers, that of the event's \
                                        owner, or the role `admin` in the tenant `main`."),
    )
)]
struct Description;

/// The description of every route, whatever roles this process has.
pub fn api_description() -> utoipa::openapi::OpenApi {
    let mut described =
        OpenApiRouter::with_openapi(Description::openapi()).merge(edges::router()).merge(api()).into_openapi();
    described.merge(hub::router().into_openapi());
    described.merge(events::router().into_openapi());
    described.merge(joins::router().into_openapi());
    openapi::complete(&mut described);
    described
}
