//! What a service of ours needs beyond the library `pillarbox`: the [`Service`] trait that every service implements, and the
//! [`ServiceContext`] that the server builds it with.
//!
//! | task                                            | use                          |
//! |-------------------------------------------------|------------------------------|
//! | answer a repeated request without a new effect  | [`idempotency::run_once`]    |
//! | execute many requests in one transaction        | [`batched_writes`]           |

pub mod batched_writes;
pub mod idempotency;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_kit::admission::limit::RateLimits;
use http_kit::auth::{TokenSigner, TokenVerifier};
use http_kit::page::CursorKey;
use pillarbox::log::Tenant;
use runtime::MetricHelp;
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use runtime::secret::{Cipher, MasterKey, Secret};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use strum::{Display, IntoStaticStr};
use tokio_util::task::TaskTracker;
use utoipa_axum::router::OpenApiRouter;

use pillarbox::consumers::{LocalHandlers, Runtime, Subscription};
use pillarbox::database::{Database, SchemaMigrations};
use pillarbox::operations::maintenance::Retention;

/// See [`Service::added_subscriptions`].
pub type AddedSubscriptions<'a> = Pin<Box<dyn Future<Output = sqlx::Result<Vec<Subscription>>> + Send + 'a>>;

/// See [`Service::delete_tenant_rows`].
pub type DeletedRows<'a> = Pin<Box<dyn Future<Output = sqlx::Result<u64>> + Send + 'a>>;

/// One service of the server: its HTTP API, its message handlers and its background work.
///
/// The constants and the functions without `self` describe the service; the server uses them in every process. It builds
/// a value only in a process that runs the service.
pub trait Service: Send + Sync + Sized + 'static {
    /// The name in the setting `services`, the name of the settings section, and the OpenAPI tag.
    const NAME: &'static str;
    /// The description of the OpenAPI tag: what the API offers, and which callers it accepts.
    const DESCRIPTION: &'static str;
    /// The shared work that the service needs done by some process: the role that does it, and the name under which shard
    /// workers claim it. The server logs a warning at the start when no process does it.
    const WORK: &'static [(Role, &'static str)] = &[];
    /// The metrics that the service records, with their help texts for `/metrics`.
    const METRICS: &'static [MetricHelp] = &[];
    /// The migrations of the service's schema, which the program applies after those of the log.
    const MIGRATIONS: SchemaMigrations;
    /// The paths of the routes that act for the tenant of the caller, so that an API key of the tenant `main` may act for another
    /// tenant there, and portal tokens are accepted. A path that ends with a slash stands for all paths below it.
    const TENANT_ROUTES: &'static [&'static str] = &[];
    /// The section `[NAME]` of the settings; `()` for a service without settings.
    type Settings;

    /// Checks the settings section. Fails with the name of the invalid setting and the values it accepts.
    fn check(_settings: &Self::Settings) -> Result<(), InvalidSetting> {
        Ok(())
    }

    /// Deletes what a deleted tenant has in the tables of the service, at most `limit` rows of each. Returns how many rows there
    /// were; 0: nothing is left, or a worker of the service deletes the rest, which no request returns. The server calls it again
    /// and again until then, also in processes that do not run the service.
    fn delete_tenant_rows<'a>(_db: &'a mut PgConnection, _tenant: &'a Tenant, _limit: i64) -> DeletedRows<'a> {
        Box::pin(async { Ok(0) })
    }

    /// Builds the service and spawns the loops that its requests need. Fails where [`Service::check`] fails, or if a value of
    /// the context, such as the address of Redis, is invalid.
    fn build(context: &ServiceContext, settings: &Self::Settings) -> Result<Self, InvalidSetting>;

    /// The HTTP routes with their OpenAPI description.
    fn routes() -> OpenApiRouter<Arc<Self>>;

    /// The message handlers. They run in processes with the role `consume`.
    fn subscriptions(&self) -> Vec<Subscription> {
        Vec::new()
    }

    /// The message handlers that depend on data, such as one for each type in a table. The server asks again and again, and
    /// starts those that it does not know yet; they run until the process ends.
    fn added_subscriptions<'a>(&'a self, _db: &'a Database) -> AddedSubscriptions<'a> {
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Starts background work that belongs to one of `roles`, other than message handlers and maintenance.
    fn start_workers(&self, _runtime: &Runtime, _roles: &Roles) {}

    /// Starts periodic tasks: retention, metrics, reconciliation. Called in processes with the role `maintain`.
    fn start_maintenance(&self, _runtime: &Runtime) {}
}

/// What the server gives to every service when it builds it.
pub struct ServiceContext {
    /// The database for requests. Its commits wake the readers of the log. It may go through a pooler in transaction mode,
    /// so session state is not available.
    pub db: Database,
    /// The database for reads that may be slightly stale: a streaming replica, or the same as `db`.
    pub read_db: Database,
    pub clock: Clock,
    /// Signs the cursors of paginated lists.
    pub cursor_key: CursorKey,
    /// The shared cache. `None`: each process caches in memory only.
    pub redis: Option<RedisAddress>,
    /// The message handlers that run in this process, for requests that wait for them.
    pub local_handlers: LocalHandlers,
    /// How long the log retains messages.
    pub retention: Retention,
    /// How long a process keeps its work without a heartbeat.
    pub lease_time: Duration,
    /// Whether the process runs with an embedded PostgreSQL, as on a developer's machine.
    pub has_embedded_database: bool,
    /// Signs the tokens of users.
    pub token_signer: TokenSigner,
    /// Verifies the tokens of all requests of this process.
    pub token_verifier: Arc<TokenVerifier>,
    /// The address under which users reach the installation, without a slash at the end.
    pub public_url: Option<String>,
    /// The rate limits of this process, of which the tenants have their part.
    pub rate_limits: RateLimits,
    /// The mail server. `None`: e-mails are captured instead of being sent.
    pub smtp_url: Option<Secret<String>>,
    private: PrivateContext,
}

/// What services use through methods only.
struct PrivateContext {
    /// The current key first.
    master_keys: Vec<MasterKey>,
    tasks: TaskTracker,
}

/// The key that signs the cursors of paginated lists. `master_keys`: the current key first.
pub fn cursor_key(master_keys: &[MasterKey]) -> CursorKey {
    CursorKey::new(master_keys.iter().map(|key| key.derive("page cursor")).collect())
}

/// A Redis server that may be shared with other installations.
#[derive(Debug, Clone)]
pub struct RedisAddress {
    pub url: Secret<String>,
    /// The prefix of all keys of this installation.
    pub prefix: String,
}

/// Fails if the address asks for TLS, which the client for Redis is built without.
pub fn refuse_redis_tls(setting: &str, url: &str) -> Result<(), InvalidSetting> {
    if !url.starts_with("rediss:") && !url.starts_with("valkeys:") {
        return Ok(());
    }
    let detail = "TLS to Redis is not supported: use an address such as redis://host:6379/0 in a private network, or put a TLS \
                  tunnel (stunnel, for example) on this machine and use its address";
    Err(InvalidSetting::new(setting, detail))
}

impl ServiceContext {
    /// A context with one pool for all requests, no Redis, no mail server, no handlers, and the default retention and lease
    /// time. `master_keys`: the current key first.
    pub fn new(
        db: Database,
        clock: Clock,
        master_keys: &[MasterKey],
        token_verifier: Arc<TokenVerifier>,
    ) -> ServiceContext {
        ServiceContext {
            read_db: db.clone(),
            db,
            clock,
            cursor_key: cursor_key(master_keys),
            redis: None,
            local_handlers: LocalHandlers::default(),
            retention: Retention::default(),
            lease_time: Duration::from_secs(15),
            has_embedded_database: false,
            token_signer: TokenSigner::new(&master_keys[0]),
            token_verifier,
            public_url: None,
            rate_limits: RateLimits::default(),
            smtp_url: None,
            private: PrivateContext { master_keys: master_keys.to_vec(), tasks: TaskTracker::new() },
        }
    }

    /// The cipher for secrets that the service stores. Each purpose has its own key.
    pub fn cipher(&self, purpose: &str) -> Cipher {
        Cipher::new(&self.private.master_keys[0], &self.private.master_keys[1..], purpose)
    }

    /// A key of 32 bytes for digests that a copy of the database must not make guessable. Each purpose has its own key.
    pub fn derived_key(&self, purpose: &str) -> [u8; 32] {
        self.private.master_keys[0].derive(purpose)
    }

    /// Runs a loop that ends by itself when the service is dropped, such as the loop of a batcher. The process waits for it
    /// when it stops.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.private.tasks.spawn(task);
    }

    /// All tasks that services have spawned.
    pub fn tasks(&self) -> &TaskTracker {
        &self.private.tasks
    }
}

/// A part of the work of a process. A process may have any set of roles, and any number of processes may have a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Display, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Role {
    /// Serves the HTTP API.
    Api,
    /// Publishes messages to RabbitMQ and reads its queues into the log.
    Relay,
    /// Runs the message handlers of the services.
    Consume,
    /// Creates hub messages from hub events.
    Fanout,
    /// Sends hub messages to subscribers, and e-mails.
    Dispatch,
    /// Runs periodic tasks: partitions, retention, reconciliation.
    Maintain,
}

/// The roles of a process.
#[derive(Debug, Clone)]
pub struct Roles(Vec<Role>);

impl Roles {
    /// An empty list means all roles.
    pub fn new(roles: Vec<Role>) -> Roles {
        Roles(roles)
    }

    pub fn contains(&self, role: Role) -> bool {
        self.0.is_empty() || self.0.contains(&role)
    }
}
