//! The hub: webhooks, ordered, signed and retried.
//!
//! An event is posted to the log ([`events::ingest`]); fan-out, a consumer of the log, creates a hub message for each matching
//! subscriber; a dispatcher sends the messages lane by lane and saves the outcomes.
//!
//! Each feature is a folder, with the layers that it has: `domain` (types and decisions), `store` (SQL), `flow` (use cases),
//! `http` with `fields` and `view` (requests and responses), `operator` (the same for commands). A feature uses those above it in
//! this table, never one below it:
//!
//! | feature | responsibility |
//! |---|---|
//! | [`error`], [`access`] | errors of use cases; who may call which route |
//! | [`directory`] | which events subscribers and streams match; answers a change when it holds everywhere |
//! | [`deliveries`] | hub messages, recipients, one attempt to send; commands and system events about them |
//! | [`rows`] | columns that become values |
//! | [`event_types`] | the catalogue: event types with their schemas |
//! | [`events`] | which messages of the log are hub events; ingest; events and messages in the API |
//! | [`dead_letters`] | messages that were given up |
//! | [`replays`] | jobs that send events again |
//! | [`streams`] | events that are pulled |
//! | [`subscribers`] | endpoints and their settings, secrets and verification |
//! | [`health`] | success rates and response times of subscribers; totals for operators |
//! | [`tenants`] | what happens when an operator suspends or deletes a tenant; its limits |
//! | [`fanout`] | turns hub events into hub messages |
//! | [`dispatch`] | sends hub messages, in order per lane |
//! | [`workers`] | maintenance and metrics |
//! | [`http`] | the router of all features |
//!
//! Owns the schema `pillarbox_hub`: subscribers and their secrets; hub messages (appended by fan-out only), attempts and
//! positions (appended by dispatchers); detached lanes, dead letters, operator commands, deferred events and replays, which are
//! few; the version of the subscribers that each dispatcher has applied; the catalogue of event types; the health of
//! subscribers and the totals of attempts; streams, their messages (appended by fan-out only), parts and readers.
//!
//! Consumes messages of source `hub` (events of all tenants), of source `hub.system` (events that the hub itself posts, see
//! [`deliveries::system_event`]), of source `hub.control` (operator commands), messages that
//! are posted in SQL as far as [`SqlEvents`] selects them (events of their tenant), and the messages of services that
//! [`Export`] selects (events of the tenant `main`). Publishes system events.
//!
//! Invariants: the messages of a lane are sent one after the other, in the order in which their events were posted; the
//! next one is sent only when the previous one is delivered or dead. An accepted event is delivered, or is visible as
//! pending or dead. A restart sends again only the requests that were in flight or whose outcome was not saved. No event
//! reaches a subscriber of another tenant. A change to a subscriber that was answered with 200 or 204 holds for every
//! request that is sent afterwards. The messages of a key of a stream are read in order, by one reader at a time, until they
//! are acknowledged.

mod access;
mod dead_letters;
mod deliveries;
mod directory;
mod dispatch;
mod error;
mod event_types;
mod events;
mod fanout;
mod health;
mod http;
mod replays;
mod rows;
mod settings;
mod streams;
mod subscribers;
mod tenants;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use http_kit::admission::caller_share::CallerLimit;
use http_kit::admission::limit::RateLimits;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::page::CursorKey;
use http_kit::problem::Problem;
use pillarbox::consumers::{Consumer, ConsumerKind, ConsumerOptions, Runtime, StartAt};
use pillarbox::database::time::maintain;
use pillarbox::database::{Database, SchemaMigrations};
use pillarbox::log::Tenant;
use runtime::MetricHelp;
use runtime::batch::Batcher;
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use runtime::secret::Cipher;
use runtime::worker::RoundLimits;
use service::batched_writes::BatchedWriteHandler;
use service::idempotency::{self, Effect, StoreResponse};
use service::{DeletedRows, Role, Roles, Service, ServiceContext};
use sqlx::{PgConnection, Postgres, Transaction};
use tokio::sync::{Mutex, mpsc};
use utoipa_axum::router::OpenApiRouter;

use crate::deliveries::clients::TenantClients;
use crate::deliveries::message::FannedBatch;
use crate::directory::sync::DirectorySync;
use crate::dispatch::{Dispatcher, LocalInput};
use crate::event_types::cache::CatalogueCache;
use crate::event_types::schema::work::SchemaWork;
use crate::events::ingest::{EventIngest, IngestBatcher};
use crate::events::selection::EventSelection;
use crate::fanout::FanOut;
use crate::fanout::checks::SqlChecks;
use crate::health::totals::AttemptTotals;
use crate::streams::waiters::StreamWaiters;
use crate::tenants::delete_tenant_rest;
use crate::tenants::quota::WaitingQuota;

pub use crate::event_types::schema::applied::AppliedSchema;
pub use crate::events::export::Export;
pub use crate::events::sql_events::SqlEvents;
pub use crate::fanout::backlog::{count_deferred, dead_letter_backlog, skip_deferred};
pub use crate::health::overview::{
    DEAD_LETTERS_COUNTED_MAX, Issue, SubscriberWithIssue, WebhookTotals, subscribers_with_issues, webhook_totals,
};
pub use crate::replays::flow::fail_all as fail_replays;
pub use crate::settings::HubSettings;
pub use crate::tenants::{delete_tenant, payload_limit_changed, tenant_changed, wait_until_applied};

/// The migrations of the schema `pillarbox_hub`.
pub const MIGRATIONS: SchemaMigrations =
    SchemaMigrations { schema: "pillarbox_hub", texts: &[include_str!("../migrations/0001_pillarbox_hub.sql")] };

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
/// Event types that are shown with all of their versions at the same time, one of each tenant, and how long others wait. Each may
/// need some megabytes.
const CATALOGUE_DOCUMENTS_MAX: usize = 2;
const CATALOGUE_DOCUMENT_WAIT_MAX: Duration = Duration::from_secs(5);
/// Imports that are checked at the same time, of a tenant and in total: each holds its file, and the versions of one type.
const CATALOGUE_IMPORTS_OF_TENANT_MAX: usize = 2;
const CATALOGUE_IMPORTS_MAX: usize = 16;
const BULK_RETRIES_MAX: usize = 4;
const BULK_RETRY_WAIT_MAX: Duration = Duration::from_secs(5);
/// The pause of the worker that polls streams, if no pull wakes it.
const STREAM_PAUSE: Duration = Duration::from_secs(60);

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
    /// Event types that are being shown with all of their versions.
    pub(crate) catalogue_documents: CallerLimit,
    /// Files of catalogues that are being checked.
    pub(crate) catalogue_imports: CallerLimit,
    /// Requests that retry many rejected events.
    pub(crate) bulk_retries: CallerLimit,
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
        ("pillarbox_hub_stale_messages", "Hub messages that could be sent and were not tried for a minute."),
        (
            "pillarbox_hub_deferred_events_lost_total",
            "Deferred events that the log no longer had when their turn came.",
        ),
        (
            "pillarbox_hub_rejected_events_total",
            "Events posted in SQL that the catalogue or a limit of the tenant refuses.",
        ),
        ("pillarbox_hub_replayed_messages_total", "Hub messages that replays have created."),
        ("pillarbox_hub_replays", "Active replays, by state."),
        ("pillarbox_hub_stream_lag_messages", "Unacknowledged messages of streams, up to 1,000 per part."),
        ("pillarbox_hub_stream_lag_seconds", "Age of the oldest unacknowledged message of a stream."),
        ("pillarbox_hub_streams_lapsed", "Streams of which retention has dropped unacknowledged messages."),
        ("eventhub_dlq_size", "Hub dead letters that were not retried; at most 1,000 are counted per subscriber."),
    ];
    const MIGRATIONS: SchemaMigrations = MIGRATIONS;
    type Settings = HubSettings;

    fn check(settings: &HubSettings) -> Result<(), InvalidSetting> {
        settings.check_limits()?;
        settings.clients(false).map(drop)
    }

    fn delete_tenant_rows<'a>(db: &'a mut PgConnection, tenant: &'a Tenant, limit: i64) -> DeletedRows<'a> {
        Box::pin(delete_tenant_rest(db, tenant, limit))
    }

    fn build(context: &ServiceContext, settings: &HubSettings) -> Result<Hub, InvalidSetting> {
        health::counters::register();
        let (db, clock) = (context.db.clone(), context.clock.clone());
        let work = SchemaWork::start().map_err(|error| {
            InvalidSetting::new("hub", format!("cannot start the threads that check schemas: {error}"))
        })?;
        let catalogue = CatalogueCache::new(&db, work);
        let handler = BatchedWriteHandler::new(&db, EventIngest);
        let (ingest, ingest_loop) = Batcher::new(handler, events::ingest::LIMITS);
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
                catalogue_documents: CallerLimit::new(1, CATALOGUE_DOCUMENTS_MAX, CATALOGUE_DOCUMENT_WAIT_MAX),
                catalogue_imports: CallerLimit::new(
                    CATALOGUE_IMPORTS_OF_TENANT_MAX,
                    CATALOGUE_IMPORTS_MAX,
                    CATALOGUE_DOCUMENT_WAIT_MAX,
                ),
                bulk_retries: CallerLimit::new(1, BULK_RETRIES_MAX, BULK_RETRY_WAIT_MAX),
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
    /// Runs `effect` in one transaction, once per `Idempotency-Key`. A repeated request gets the stored response.
    pub(crate) async fn run_once<F>(
        self: &Arc<Hub>,
        identity: Option<&RequestIdentity>,
        keep: StoreResponse,
        effect: F,
    ) -> Result<StoredResponse, Problem>
    where
        F: for<'t> FnOnce(&'t mut Transaction<'_, Postgres>, Arc<Hub>) -> Effect<'t> + Send,
    {
        let shared = Arc::clone(self);
        idempotency::run_once(&self.db, identity, keep, |tx| effect(tx, shared)).await
    }

    fn start_fan_out(&self, runtime: &Runtime, handing_over: mpsc::Sender<FannedBatch>) {
        let consumer = Consumer {
            name: FAN_OUT.to_owned(),
            kind: ConsumerKind::Handler,
            filter: self.events.fan_out(),
            start: StartAt::Beginning,
        };
        let mut options = ConsumerOptions::default();
        (options.worker.batch, options.worker.in_log_order) = (FAN_OUT_BATCH, true);
        let (waiters, checks) = (&self.stream_waiters, SqlChecks::new(runtime.db(), &self.catalogue));
        let fan_out = || {
            FanOut::new(self.clock.clone(), self.events.clone(), handing_over.clone(), waiters.clone(), checks.clone())
        };
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
