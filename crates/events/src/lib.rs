//! Events: created, published, found, canceled.
//!
//! Owns the schema `pillarbox_events`: events and the history of their statuses (the audit trail), cities with the number
//! of their events, the scores of the trending feed, reconciliation runs, and the generations that validate cached pages.
//!
//! Publishes messages of source `events` with the event's id as key: `event.published`, `event.updated`,
//! `event.unpublished`, `event.canceled`, each with the current event and its version; for reconciliation
//! `event.versions`, and `event.restated` for events that differ. Consumes messages of source `joins`: `join.#` and
//! `mod.#` with absolute counts, and `join.counted`, the reply to `event.versions`. Consumes `account.deleted` of identity
//! (`events.accounts`): a worker cancels or deletes the events of that user.
//!
//! Invariants: an event changes its status only along [`domain::Status::after`], one change at a time, and every change
//! is recorded with its user. Only the owner changes and publishes an event; an admin may unpublish or cancel it, with a
//! reason. Only the owner and admins see a draft. The change, its record and its message commit together. The count with
//! the highest version wins, in whatever order counts arrive. An event that is read after a change has committed shows the
//! change, in every process: its cache entry is validated against the database. So are feed pages and city suggestions,
//! against the database that feeds are read from; a replica may lag. They also have numbers that no change invalidates: the
//! participant counts of a feed page may be 15 s old, and the event counts of city suggestions 1 h.

mod cache;
mod coalesced_reads;
mod counters;
mod domain;
mod error;
mod fields;
mod flow;
mod http;
mod inbox;
mod search;
mod store;
mod view;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use http_kit::admission::caller_share::CallerLimit;
use http_kit::page::CursorKey;
use pillarbox::consumers::{LocalHandlers, Runtime, Subscription};
use pillarbox::database::time::maintain;
use pillarbox::database::{Database, SchemaMigrations};
use runtime::MetricHelp;
use runtime::batch::{Batcher, Limits};
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use serde::{Deserialize, Serialize};
use service::{RedisAddress, Role, Service, ServiceContext};
use utoipa_axum::router::OpenApiRouter;

pub use crate::flow::reconcile;

use crate::cache::Cache;
use crate::coalesced_reads::{EventReader, GenerationReader};

/// The migrations of the schema `pillarbox_events`.
pub const MIGRATIONS: SchemaMigrations =
    SchemaMigrations { schema: "pillarbox_events", texts: &[include_str!("../migrations/0001_pillarbox_events.sql")] };

/// Maximum pause between two checks whether a periodic task is due.
const CHECK_PAUSE_MAX: Duration = Duration::from_secs(30);
/// Maximum pause between two checks for new events that the trending feed lacks. A cached page is 15 s old at most, so a new
/// event is in the feed within a minute.
const TRENDING_PAUSE_MAX: Duration = Duration::from_secs(20);
/// Pause between two checks for events of deleted accounts.
const DELETED_OWNERS_PAUSE: Duration = Duration::from_secs(2);

/// Searches of a process that run at the same time: of one caller, and in total. Each may use a processor of the database for as
/// long as a search may take.
const SEARCHES_OF_CALLER_MAX: usize = 2;
const SEARCHES_MAX: usize = 4;
/// How long a search waits for others before it is refused.
const SEARCH_WAIT_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsSettings {
    /// Interval in seconds at which the trending feed is scored.
    pub trending_seconds: u32,
    /// Interval in minutes at which counts are reconciled with the joins service; 0 disables it.
    pub reconcile_minutes: u32,
}

impl Default for EventsSettings {
    fn default() -> EventsSettings {
        EventsSettings { trending_seconds: 300, reconcile_minutes: 60 }
    }
}

/// The events service of one process.
pub struct Events {
    pub(crate) db: Database,
    /// Where the feeds are read: a replica, or the same as `db`.
    pub(crate) feed_db: Database,
    pub(crate) searches: CallerLimit,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) local_handlers: LocalHandlers,
    pub(crate) cache: Cache,
    pub(crate) event_reader: Batcher<EventReader>,
    pub(crate) generation_reader: Batcher<GenerationReader>,
    settings: EventsSettings,
}

impl Service for Events {
    const NAME: &'static str = "events";
    const DESCRIPTION: &'static str = "Events. Anyone may read published events; everything else requires a user's token. \
         Admins of the tenant `main`, with a token or an API key, may also unpublish and cancel events, and read the audit \
         trail.";
    const WORK: &'static [(Role, &'static str)] =
        &[(Role::Consume, "events.counts"), (Role::Consume, "events.accounts")];
    const METRICS: &'static [MetricHelp] = &[
        ("pillarbox_events_cache_total", "Cache lookups by outcome; `away` means that Redis did not answer in time."),
        ("pillarbox_reconcile_drift_total", "Differences between services that reconciliation has found."),
    ];
    const MIGRATIONS: SchemaMigrations = MIGRATIONS;
    type Settings = EventsSettings;

    fn check(settings: &EventsSettings) -> Result<(), InvalidSetting> {
        if (1..=86_400).contains(&settings.trending_seconds) {
            Ok(())
        } else {
            Err(InvalidSetting::new("events.trending_seconds", "must be a number from 1 to 86400"))
        }
    }

    fn build(context: &ServiceContext, settings: &EventsSettings) -> Result<Events, InvalidSetting> {
        counters::register();
        let (db, feed_db) = (context.db.clone(), context.read_db.clone());
        let cache = Cache::new(context.clock.clone(), redis_client(context)?);
        let dropped = cache.clone();
        db.on_invalidation(move || dropped.clear());
        let limits = Limits::new(500, 10_000);
        let (event_reader, event_loop) = Batcher::new(EventReader::new(&db, cache.clone()), limits);
        let (generation_reader, generation_loop) = Batcher::new(GenerationReader::new(&feed_db), limits);
        context.spawn(event_loop);
        context.spawn(generation_loop);
        Ok(Events {
            db,
            feed_db,
            searches: CallerLimit::new(SEARCHES_OF_CALLER_MAX, SEARCHES_MAX, SEARCH_WAIT_MAX),
            clock: context.clock.clone(),
            cursor_key: context.cursor_key.clone(),
            local_handlers: context.local_handlers.clone(),
            cache,
            event_reader,
            generation_reader,
            settings: settings.clone(),
        })
    }

    fn routes() -> OpenApiRouter<Arc<Events>> {
        http::router()
    }

    fn subscriptions(&self) -> Vec<Subscription> {
        inbox::subscriptions(&self.clock)
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        let every = TimeDelta::seconds(i64::from(self.settings.trending_seconds));
        let pause = Duration::from_secs(u64::from(self.settings.trending_seconds)).min(TRENDING_PAUSE_MAX);
        let (worker, db) = (runtime.worker("events.trending".to_owned(), pause), runtime.db().pool().clone());
        runtime.spawn(async move { worker.run(|| maintain(&db, workers::score(&db, every))).await });
        let (worker, db) =
            (runtime.worker("events.deleted_owners".to_owned(), DELETED_OWNERS_PAUSE), runtime.db().clone());
        let local_handlers = self.local_handlers.clone();
        runtime.spawn(async move {
            let close = || maintain(db.pool(), flow::handover::close_next(&db, local_handlers.delivery()));
            worker.run(close).await;
        });
        if self.settings.reconcile_minutes == 0 {
            return;
        }
        let every = TimeDelta::minutes(i64::from(self.settings.reconcile_minutes));
        let (worker, db) = (runtime.worker("events.reconcile".to_owned(), CHECK_PAUSE_MAX), runtime.db().clone());
        runtime.spawn(async move { worker.run(|| maintain(db.pool(), workers::reconcile(&db, every))).await });
    }
}

impl Events {
    /// Every combination of feed filters, with the query plan of one page. It exists for a test, which
    /// checks that indexes serve all of them: only this crate knows the queries.
    pub async fn feed_plans(&self) -> sqlx::Result<Vec<(String, String)>> {
        flow::feed::plans(self).await
    }
}

/// The client of the shared cache, which connects when it is first used, and the prefix of its keys.
fn redis_client(context: &ServiceContext) -> Result<Option<(redis::Client, String)>, InvalidSetting> {
    let Some(RedisAddress { url, prefix }) = &context.redis else { return Ok(None) };
    // The parser's error may quote the password.
    let client = redis::Client::open(url.reveal().as_str())
        .map_err(|_| InvalidSetting::new("redis_url", "must be an address such as redis://host:6379/0"))?;
    Ok(Some((client, prefix.clone())))
}
