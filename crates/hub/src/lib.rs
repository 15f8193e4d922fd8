//! The hub: webhooks, ordered, signed and retried.
//!
//! An event is posted to the log ([`ingest`]); fan-out, a consumer of the log, creates a hub message for each matching
//! subscriber; a dispatcher sends the messages lane by lane and saves the outcomes.
//!
//! | module | responsibility |
//! |---|---|
//! | [`event_selection`] | which messages of the log are hub events |
//! | [`ingest`] | accepts events over HTTP, many in one transaction |
//! | [`catalogue`] | event types with their schemas, which ingest enforces |
//! | [`system_event`] | what the hub itself reports as events |
//! | [`health`] | success rates and response times of subscribers over time |
//! | [`attempt_totals`] | counts all attempts for the overview of operators |
//! | [`quota`] | refuses the events of a tenant with too many waiting messages |
//! | [`fanout`] | turns hub events into hub messages |
//! | [`replay`] | jobs that send events again |
//! | [`dispatch`] | sends hub messages, in order per lane |
//! | [`stream_waiters`] | pulls of streams that wait for messages |
//! | [`directory_sync`] | answers a change to a subscriber when it holds everywhere |
//! | [`tenants`] | what happens to subscribers when an operator suspends or deletes their tenant |
//! | [`client`], [`dial`], [`connection_pool`], [`tenant_clients`] | the HTTP client that connects to vetted addresses only |
//! | [`access_token`], [`client_identity`] | the credentials of endpoints that require OAuth 2 or mutual TLS |
//! | [`hub_message`], [`delivery`], [`operator_command`] | types that fan-out, dispatcher and store share |
//!
//! Owns the schema `pillarbox_hub`: subscribers and their secrets; hub messages (appended by fan-out only), attempts and
//! positions (appended by dispatchers); detached lanes, dead letters, operator commands, deferred events and replays, which are
//! few; the version of the subscribers that each dispatcher has applied; the catalogue of event types; the health of
//! subscribers and the totals of attempts; streams, their messages (appended by fan-out only), parts and readers.
//!
//! Consumes messages of source `hub` (events of all tenants), of source `hub.system` (events that the hub itself posts, see
//! [`system_event`]), of source `hub.control` (operator commands), messages that
//! are posted in SQL as far as [`SqlEvents`] selects them (events of their tenant), and the messages of services that
//! [`Export`] selects (events of the tenant `main`). Publishes system events.
//!
//! Invariants: the messages of a lane are sent one after the other, in the order in which their events were posted; the
//! next one is sent only when the previous one is delivered or dead. An accepted event is delivered, or is visible as
//! pending or dead. A restart sends again only the requests that were in flight or whose outcome was not saved. No event
//! reaches a subscriber of another tenant. A change to a subscriber that was answered with 200 or 204 holds for every
//! request that is sent afterwards. The messages of a key of a stream are read in order, by one reader at a time, until they
//! are acknowledged.

mod access_token;
pub mod address;
mod attempt_totals;
mod backlog;
mod catalogue;
pub mod client;
pub mod client_identity;
mod connection_pool;
mod delivery;
mod dial;
mod directory_sync;
mod dispatch;
pub mod domain;
mod error;
mod event_selection;
mod export;
mod fanout;
mod fields;
mod flow;
mod headers;
mod health;
mod http;
mod hub_message;
mod ingest;
mod operator_catalogue;
mod operator_command;
mod operator_overview;
mod operator_replays;
mod operator_streams;
mod quota;
mod replay;
mod replay_fields;
mod send_permit;
pub mod signature;
mod sql_events;
mod store;
mod stream;
mod stream_fields;
mod stream_waiters;
mod system_event;
pub mod target;
mod tenant_clients;
mod tenants;
mod view;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use kit::auth::Tenant;
use kit::batch::Batcher;
use kit::clock::Clock;
use kit::config::InvalidSetting;
use kit::limit::RateLimits;
use kit::page::CursorKey;
use kit::secret::Cipher;
use kit::telemetry::MetricHelp;
use kit::worker::RoundLimits;
use mailbox::batched_writes::BatchedWriteHandler;
use mailbox::consumers::{Consumer, ConsumerKind, ConsumerOptions, Runtime, StartAt};
use mailbox::database::Database;
use mailbox::database::time::maintain;
use mailbox::service::{DeletedRows, Role, Roles, Service, ServiceContext};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use tokio::sync::{Mutex, mpsc};
use utoipa_axum::router::OpenApiRouter;

use crate::address::AllowedNetworks;
use crate::attempt_totals::AttemptTotals;
pub use crate::backlog::{count_deferred, dead_letter_backlog, skip_deferred};
pub use crate::catalogue::AppliedSchema;
use crate::catalogue::cache::CatalogueCache;
use crate::client::{Client, ClientSettings};
use crate::directory_sync::DirectorySync;
use crate::dispatch::{Dispatcher, LocalInput};
use crate::event_selection::EventSelection;
pub use crate::export::Export;
use crate::fanout::FanOut;
use crate::hub_message::FannedBatch;
use crate::ingest::{EventIngest, IngestBatcher};
pub use crate::operator_catalogue::{
    ImportOptions, export_catalogue, import_catalogue, list_event_types, show_event_type,
};
pub use crate::operator_overview::{
    DEAD_LETTERS_COUNTED_MAX, Trouble, TroubledSubscriber, WebhookTotals, troubled_subscribers, webhook_totals,
};
pub use crate::operator_replays::{change_replay, fail_replays, list_replays, request_replay, show_replay};
pub use crate::operator_streams::{delete_stream, list_streams, seek_stream, show_stream};
use crate::quota::WaitingQuota;
pub use crate::sql_events::SqlEvents;
use crate::stream_waiters::StreamWaiters;
use crate::tenant_clients::TenantClients;
use crate::tenants::delete_tenant_rest;
pub use crate::tenants::{delete_tenant, tenant_changed, wait_until_applied};

/// Number of events that fan-out reads at a time; more while it lags.
const FAN_OUT_BATCH: u32 = 500;
/// Number of batches that fan-out may be ahead of the dispatcher in the same process.
const HANDED_OVER_MAX: usize = 64;

/// The name of the service.
pub const NAME: &str = "hub";
/// The name of the consumer that is fan-out.
pub const FAN_OUT: &str = "hub.fanout";
/// The name under which dispatchers claim their shards.
const DISPATCH: &str = "hub.dispatch";

const DISPATCH_PAUSE: Duration = Duration::from_millis(100);
const MAINTAIN_PAUSE: Duration = Duration::from_secs(600);
const MEASURE_PAUSE: Duration = Duration::from_secs(30);
/// How old the totals of attempts are at most.
const TOTALS_PAUSE: Duration = Duration::from_secs(1);
const COUNT_PAUSE_MAX: Duration = Duration::from_secs(600);
/// How old the counts of waiting messages are at most when ingest uses them.
const QUOTA_PAUSE: Duration = Duration::from_secs(1);
/// The pause of the worker that polls streams, if no pull wakes it.
const STREAM_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HubSettings {
    /// Non-public networks that the webhooks of every tenant may reach, such as `10.1.0.0/16`. Without the setting: none,
    /// except loopback for the tenant `main` of an instance with an embedded PostgreSQL, so that it can be tried on one
    /// machine.
    pub allowed_networks: Option<AllowedNetworks>,
    /// The ports that webhooks may reach. Empty: all.
    #[serde(deserialize_with = "kit::config::list")]
    pub allowed_ports: Vec<u16>,
    pub https_only: bool,
    /// The proxy through which webhooks are sent: `http://[user:password@]host:port`.
    pub egress_proxy: Option<kit::secret::Secret<String>>,
    /// Retention of delivery attempts.
    pub attempt_days: u32,
    /// How long a dead letter can be retried.
    pub dead_letter_days: u32,
    /// Retention of the health of subscribers.
    pub health_days: u32,
    /// Topics of the services that become hub events of the tenant `main`: `["event.*", "join.*"]`.
    pub export: Export,
    /// Topics of messages posted in SQL that become hub events of their tenant: `["order.*"]`. `*`: all but e-mails.
    pub sql_events: SqlEvents,
    /// Requests in flight, of all subscribers of a process.
    pub in_flight_max: u32,
    /// Subscribers of a tenant.
    pub subscribers_max: u32,
    /// Hub messages of a tenant that may wait. With more, its events are refused.
    pub waiting_max: u64,
    /// How long the answer to a change of a subscriber waits for the dispatchers.
    pub change_wait_ms: u32,
    /// Every endpoint has to answer a challenge before it gets webhooks.
    pub verify_endpoints: bool,
}

impl Default for HubSettings {
    fn default() -> HubSettings {
        HubSettings {
            allowed_networks: None,
            allowed_ports: Vec::new(),
            https_only: false,
            egress_proxy: None,
            attempt_days: 30,
            dead_letter_days: 90,
            health_days: 30,
            export: Export::default(),
            sql_events: SqlEvents::default(),
            in_flight_max: 4_096,
            subscribers_max: 10_000,
            waiting_max: 10_000_000,
            change_wait_ms: 5_000,
            verify_endpoints: false,
        }
    }
}

impl HubSettings {
    /// Fails with the name of the limit that is out of range.
    fn check_limits(&self) -> Result<(), InvalidSetting> {
        let limits = [
            ("hub.health_days", u64::from(self.health_days), 1..=366),
            ("hub.in_flight_max", u64::from(self.in_flight_max), 16..=100_000),
            ("hub.subscribers_max", u64::from(self.subscribers_max), 1..=100_000),
            ("hub.waiting_max", self.waiting_max, 100..=1_000_000_000_000),
            ("hub.change_wait_ms", u64::from(self.change_wait_ms), 10..=25_000),
        ];
        for (setting, value, range) in limits {
            if !range.contains(&value) {
                let detail = format!("must be from {} to {}, not {value}", range.start(), range.end());
                return Err(InvalidSetting::new(setting, detail));
            }
        }
        Ok(())
    }

    /// Builds the HTTP clients that send webhooks. Fails with the name of the invalid setting and the values it accepts.
    fn clients(&self, has_embedded_database: bool) -> Result<TenantClients, InvalidSetting> {
        match &self.allowed_networks {
            Some(networks) => Ok(TenantClients::shared(self.client(networks.clone())?)),
            None if !has_embedded_database => Ok(TenantClients::shared(self.client(AllowedNetworks::default())?)),
            // The operator, whose tenant is `main`, can try webhooks on one machine. Another tenant must not reach what
            // listens on loopback: the operator's own services.
            None => Ok(TenantClients::new(
                self.client(AllowedNetworks::loopback())?,
                self.client(AllowedNetworks::default())?,
            )),
        }
    }

    fn client(&self, allowed_networks: AllowedNetworks) -> Result<Client, InvalidSetting> {
        let proxy = match &self.egress_proxy {
            Some(proxy) => {
                Some(proxy.reveal().parse().map_err(|error: String| InvalidSetting::new("hub.egress_proxy", error))?)
            }
            None => None,
        };
        if self.allowed_ports.contains(&0) {
            return Err(InvalidSetting::new("hub.allowed_ports", "must be a list of numbers from 1 to 65535"));
        }
        let settings = ClientSettings {
            allowed_networks,
            https_only: self.https_only,
            allowed_ports: self.allowed_ports.clone(),
            proxy,
            ..ClientSettings::default()
        };
        Client::new(settings).map_err(|error| InvalidSetting::new("hub", error))
    }
}

/// The hub of one process.
pub struct Hub {
    pub(crate) db: Database,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) cipher: Cipher,
    pub(crate) clients: TenantClients,
    pub(crate) ingest: IngestBatcher,
    pub(crate) catalogue: CatalogueCache,
    pub(crate) export: Export,
    pub(crate) events: EventSelection,
    pub(crate) limits: Limits,
    pub(crate) stream_waiters: StreamWaiters,
    pub(crate) directory: DirectorySync,
    pub(crate) change_time_max: Duration,
    pub(crate) verify_endpoints: bool,
    retention: workers::HubRetention,
}

/// How much tenants may use.
pub(crate) struct Limits {
    pub(crate) waiting: WaitingQuota,
    pub(crate) rates: RateLimits,
    pub(crate) subscribers_max: u32,
    in_flight_max: u32,
}

impl Service for Hub {
    const NAME: &'static str = NAME;
    const DESCRIPTION: &'static str = "Webhooks. Posting events requires a key with the role `ingest`, everything else the \
                                       role `manage`, or a portal token. A caller sees only its own tenant; a key of the \
                                       tenant `main` acts for another one with the header `Pillarbox-Tenant`.";
    const TENANT_ROUTES: &'static [&'static str] = &["/hub/v1/", "/events"];
    const WORK: &'static [(Role, &'static str)] = &[(Role::Fanout, FAN_OUT), (Role::Dispatch, DISPATCH)];
    const METRICS: &'static [MetricHelp] = &[
        ("eventhub_events_received_total", "Accepted hub events."),
        ("eventhub_messages_delivered_total", "Attempts to deliver a hub message, by outcome."),
        ("eventhub_delivery_latency_seconds", "Response time of subscribers."),
        ("eventhub_pending_messages", "Pending hub messages; at most 1,000 are counted per subscriber."),
        ("eventhub_stale_messages", "Hub messages that could be sent and that nobody has tried to send for a minute."),
        ("eventhub_deferred_events_lost_total", "Deferred events that the log no longer had when their turn came."),
        ("eventhub_replayed_messages_total", "Hub messages that replays have created."),
        ("eventhub_replays", "Active replays, by state."),
        ("eventhub_stream_lag_messages", "Messages of streams that nobody has acknowledged, up to 1,000 per part."),
        ("eventhub_stream_lag_seconds", "Age of the oldest message of a stream that nobody has acknowledged."),
        ("eventhub_streams_lapsed", "Streams of which retention has dropped messages that nobody has acknowledged."),
        ("eventhub_dlq_size", "Hub dead letters that nobody has retried; at most 1,000 are counted per subscriber."),
    ];
    type Settings = HubSettings;

    fn check(settings: &HubSettings) -> Result<(), InvalidSetting> {
        settings.check_limits()?;
        settings.clients(false).map(drop)
    }

    fn delete_tenant_rows<'a>(db: &'a mut PgConnection, tenant: &'a Tenant, limit: i64) -> DeletedRows<'a> {
        Box::pin(delete_tenant_rest(db, tenant, limit))
    }

    fn build(context: &ServiceContext, settings: &HubSettings) -> Result<Hub, InvalidSetting> {
        let (db, clock) = (context.db.clone(), context.clock.clone());
        let catalogue = CatalogueCache::new(&db);
        let handler = BatchedWriteHandler::new(&db, EventIngest);
        let (ingest, ingest_loop) = Batcher::new(handler, ingest::LIMITS);
        context.spawn(ingest_loop);
        let stream_waiters = StreamWaiters::default();
        let waiters = stream_waiters.clone();
        db.on_invalidation(move || waiters.reset());
        Ok(Hub {
            db,
            clock,
            cursor_key: context.cursor_key.clone(),
            cipher: context.cipher("hub secrets"),
            clients: settings.clients(context.has_embedded_database)?,
            ingest,
            catalogue,
            export: settings.export.clone(),
            events: EventSelection::new(&settings.export, &settings.sql_events),
            limits: Limits {
                waiting: WaitingQuota::new(settings.waiting_max),
                rates: context.rate_limits.clone(),
                subscribers_max: settings.subscribers_max,
                in_flight_max: settings.in_flight_max,
            },
            stream_waiters,
            directory: DirectorySync::new(context.lease_time),
            change_time_max: Duration::from_millis(settings.change_wait_ms.into()),
            verify_endpoints: settings.verify_endpoints,
            retention: workers::HubRetention {
                log: context.retention,
                attempts: settings.attempt_days,
                dead_letters: settings.dead_letter_days,
                health: settings.health_days,
            },
        })
    }

    fn routes() -> OpenApiRouter<Arc<Hub>> {
        http::router()
    }

    fn start_workers(&self, runtime: &Runtime, roles: &Roles) {
        // Fan-out hands new hub messages to the dispatcher of its process, if there is one.
        let (handing_over, handed_over) = mpsc::channel(HANDED_OVER_MAX);
        if roles.contains(Role::Fanout) {
            self.start_fan_out(runtime, handing_over);
        }
        if roles.contains(Role::Dispatch) {
            self.start_dispatcher(runtime, handed_over);
        }
        if roles.contains(Role::Api) {
            let (worker, db) = (runtime.worker("hub.quota".to_owned(), QUOTA_PAUSE), runtime.db().pool().clone());
            let quota = self.limits.waiting.clone();
            runtime.spawn(async move { worker.run(|| quota.refresh(&db)).await });
            self.start_stream_poller(runtime);
        }
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        let worker = runtime.worker("hub.maintain".to_owned(), MAINTAIN_PAUSE).with_limits(RoundLimits::LONG);
        let db = runtime.db().pool().clone();
        let retention = self.retention;
        runtime.spawn(async move { worker.run(|| maintain(&db, workers::maintain(&db, retention))).await });
        let (worker, db) = (runtime.worker("hub.measure".to_owned(), MEASURE_PAUSE), runtime.db().pool().clone());
        runtime.spawn(async move { worker.run(|| workers::measure(&db)).await });
        let (worker, db) = (runtime.worker("hub.count".to_owned(), COUNT_PAUSE_MAX), runtime.db().pool().clone());
        let quota = self.limits.waiting.clone();
        runtime.spawn(async move { worker.run(|| quota.count(&db)).await });
    }
}

impl Hub {
    fn start_fan_out(&self, runtime: &Runtime, handing_over: mpsc::Sender<FannedBatch>) {
        let consumer = Consumer {
            name: FAN_OUT.to_owned(),
            kind: ConsumerKind::Handler,
            filter: self.events.fan_out(),
            start: StartAt::Beginning,
        };
        let mut options = ConsumerOptions::default();
        (options.worker.batch, options.worker.in_log_order) = (FAN_OUT_BATCH, true);
        let waiters = &self.stream_waiters;
        let fan_out = || FanOut::new(self.clock.clone(), self.events.clone(), handing_over.clone(), waiters.clone());
        runtime.consume(&consumer, options, fan_out);
    }

    /// Polls for messages that another process has appended to streams, while pulls wait. Ends their wait when the process
    /// stops.
    fn start_stream_poller(&self, runtime: &Runtime) {
        let (mut worker, db) = (runtime.worker("hub.streams".to_owned(), STREAM_PAUSE), runtime.db().pool().clone());
        let waiters = self.stream_waiters.clone();
        worker.wake = waiters.poller();
        runtime.spawn(async move {
            worker.run(|| waiters.poll(&db)).await;
            waiters.close();
        });
    }

    fn start_dispatcher(&self, runtime: &Runtime, handed_over: mpsc::Receiver<FannedBatch>) {
        let (adding, db) = (runtime.worker("hub.totals".to_owned(), TOTALS_PAUSE), runtime.db().pool().clone());
        let totals = AttemptTotals::default();
        let (rest, last_db) = (totals.clone(), db.clone());
        let dispatcher = Dispatcher::new(
            runtime.db(),
            self.clock.clone(),
            self.clients.clone(),
            self.cipher.clone(),
            runtime.shard_assignment(DISPATCH),
            LocalInput { handed_over, directory: self.directory.clone(), totals: totals.clone() },
            self.limits.in_flight_max as usize,
        );
        let worker = runtime.worker(DISPATCH.to_owned(), DISPATCH_PAUSE).with_limits(RoundLimits::STEPS);
        runtime.spawn(async move {
            let dispatcher = Mutex::new(dispatcher);
            worker.run(async || dispatcher.lock().await.round().await).await;
            dispatcher.into_inner().close().await;
            if let Err(error) = rest.flush(&last_db).await {
                tracing::debug!(%error, "the last attempts are not part of the totals");
            }
        });
        runtime.spawn(async move { adding.run(|| totals.flush(&db)).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_out_of_range_is_refused_with_its_name_and_range() {
        assert!(Hub::check(&HubSettings::default()).is_ok());
        let refused = |change: fn(&mut HubSettings)| {
            let mut settings = HubSettings::default();
            change(&mut settings);
            Hub::check(&settings).unwrap_err().to_string()
        };
        for (error, setting, range) in [
            (refused(|settings| settings.health_days = 0), "hub.health_days", "from 1 to 366"),
            (refused(|settings| settings.in_flight_max = 15), "hub.in_flight_max", "from 16 to 100000"),
            (refused(|settings| settings.subscribers_max = 0), "hub.subscribers_max", "from 1 to 100000"),
            (refused(|settings| settings.waiting_max = 99), "hub.waiting_max", "from 100 to 1000000000000"),
            (refused(|settings| settings.change_wait_ms = 9), "hub.change_wait_ms", "from 10 to 25000"),
        ] {
            assert!(error.contains(setting) && error.contains(range), "{error}");
        }
    }
}
