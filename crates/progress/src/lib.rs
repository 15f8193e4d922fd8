//! Progress: counts the items of a project that are done, and says once when all of them are.
//!
//! Owns the schema `pillarbox_progress`: projects with their final state, which of them have completed, and the counts of
//! unfinished ones if no Redis is configured for them. In Redis: the hash `smap:proj:{id}`, the set `smap:proj:{id}:items` and the
//! rate `smap:proj:{id}:rate`.
//!
//! Publishes `job.completed` of source `progress` with the project's id as key. Consumes `account.deleted` of identity (consumer
//! `progress.accounts`), and deletes the projects of the user, as it does those of a deleted tenant.
//!
//! Invariants: an item counts once. A project completes when `total > 0`, `done >= total` and the status is not CRAWLING, DONE or
//! FAILED; this is decided together with the change that reaches it, so no later change is accepted. A completed project has one
//! row in `completed`, which commits with its message. Counts that may lack something are reported as lost and never shown.

mod counters;
mod counts;
mod domain;
mod error;
mod flow;
mod http;
mod inbox;
mod settings;
mod state;
mod store;
mod view;
mod watch;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use http_kit::admission::gates::Gates;
use http_kit::page::CursorKey;
use metrics::Counter;
use moka::future::Cache;
use pillarbox::consumers::{Runtime, Subscription};
use pillarbox::database::time::maintain;
use pillarbox::database::{Database, SchemaMigrations};
use pillarbox::log::Tenant;
use runtime::MetricHelp;
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use runtime::worker::{Wake, Worker};
use service::{DeletedRows, Role, Roles, Service, ServiceContext};
use sqlx::PgConnection;
use utoipa_axum::router::OpenApiRouter;

pub use crate::settings::{ProgressSettings, Settings};

use crate::counts::Limits;
use crate::domain::Project;
use crate::flow::completion::Check;
use crate::state::postgres::CHANGES_MAX;
use crate::state::redis::Link;
use crate::state::{PostgresState, RedisState, State};
use crate::view::ViewTimes;
use crate::watch::Watched;

/// The migrations of the schema `pillarbox_progress`.
pub const MIGRATIONS: SchemaMigrations = SchemaMigrations {
    schema: "pillarbox_progress",
    texts: &[include_str!("../migrations/0001_pillarbox_progress.sql")],
};

/// The name of the Redis with the counts in `/readyz`.
const REDIS: &str = "progress-redis";
/// Pause between two walks over the unfinished projects.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
/// Pause between two checks for what is no longer needed.
const RETENTION_PAUSE: Duration = Duration::from_secs(60);
/// Pause between two checks for projects of deleted tenants. A deleted account wakes the worker.
const DELETION_PAUSE: Duration = Duration::from_secs(5);
/// How long a project is cached. Its owner never changes; what does change is found out by those who use it.
const CACHE_TIME: Duration = Duration::from_secs(10);
const CACHED_MAX: u64 = 50_000;

/// The progress service of one process. Clones share everything.
#[derive(Clone)]
pub struct Progress {
    pub(crate) db: Database,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) state: Arc<State>,
    pub(crate) projects: Cache<String, Arc<Project>>,
    pub(crate) watched: Arc<Watched>,
    /// Created once: looking a counter up by name costs more than incrementing it.
    pub(crate) items_counted: Counter,
    pub(crate) ttl: TimeDelta,
    pub(crate) unfinished_max: u32,
    /// The largest total of a project.
    pub(crate) items_max: i64,
    pub(crate) retention: TimeDelta,
    /// Wakes the worker that deletes projects, when there are some of a deleted account.
    pub(crate) deletions: Wake,
}

impl Progress {
    pub(crate) fn view_times(&self) -> ViewTimes {
        ViewTimes { now: self.clock.now(), retention: self.retention }
    }
}

impl Service for Progress {
    const NAME: &'static str = "progress";
    const DESCRIPTION: &'static str = "The progress of projects with many items. Requires a user's token or an API key; a project \
         belongs to the user, or to the tenant of the key, and does not exist for others. Admins of the tenant `main` see all.";
    const WORK: &'static [(Role, &'static str)] = &[(Role::Consume, inbox::ACCOUNTS_CONSUMER)];
    const METRICS: &'static [MetricHelp] = &[
        ("pillarbox_progress_items_total", "Items that were counted."),
        ("pillarbox_progress_completed_total", "Projects that have completed."),
        ("pillarbox_progress_lost_total", "Requests that were answered with progress-lost."),
        ("pillarbox_progress_redis_up", "Whether the Redis with the counts is connected."),
        ("pillarbox_progress_redis_memory_ratio", "The used share of maxmemory of this Redis; 0 without a limit."),
    ];
    const MIGRATIONS: SchemaMigrations = MIGRATIONS;
    type Settings = Settings;

    fn check(settings: &Settings) -> Result<(), InvalidSetting> {
        settings.progress.check()
    }

    fn delete_tenant_rows<'a>(db: &'a mut PgConnection, tenant: &'a Tenant, limit: i64) -> DeletedRows<'a> {
        Box::pin(flow::deletion::disown_of_tenant(db, tenant, limit))
    }

    fn build(context: &ServiceContext, settings: &Settings) -> Result<Progress, InvalidSetting> {
        counters::register();
        let Settings { progress: settings, redis_prefix } = settings;
        let (db, clock) = (context.db.clone(), context.clock.clone());
        let ttl = TimeDelta::days(i64::from(settings.ttl_days));
        let limits = Limits { items_max: settings.items_max as i64, keep: ttl };
        let state = match settings.redis_client()? {
            Some(client) => State::Redis(Arc::new(RedisState {
                link: Link::new(client, redis_prefix),
                prefix: redis_prefix.clone(),
                is_durable: settings.redis_is_durable,
                clock: clock.clone(),
                limits,
            })),
            None => State::Postgres(Arc::new(PostgresState {
                db: db.clone(),
                clock: clock.clone(),
                limits,
                gates: Gates::new(CHANGES_MAX),
            })),
        };
        let projects = Cache::builder().max_capacity(CACHED_MAX).time_to_live(CACHE_TIME).build();
        let cached = projects.clone();
        db.on_invalidation(move || cached.invalidate_all());
        Ok(Progress {
            db,
            clock,
            cursor_key: context.cursor_key.clone(),
            state: Arc::new(state),
            projects,
            watched: Arc::default(),
            items_counted: metrics::counter!("pillarbox_progress_items_total"),
            ttl,
            unfinished_max: settings.unfinished_max,
            items_max: limits.items_max,
            retention: TimeDelta::days(i64::from(settings.retention_days)),
            deletions: Wake::default(),
        })
    }

    fn routes() -> OpenApiRouter<Arc<Progress>> {
        http::router()
    }

    fn subscriptions(&self) -> Vec<Subscription> {
        inbox::subscriptions(self)
    }

    fn start_workers(&self, runtime: &Runtime, _: &Roles) {
        if matches!(*self.state, State::Redis(_)) {
            let (state, stop) = (self.state.clone(), runtime.stop_token());
            let probe = runtime.dependency(REDIS);
            runtime.spawn(async move {
                if let State::Redis(redis) = &*state {
                    redis.link.run(&probe, &stop).await;
                }
            });
        }
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        let worker = runtime.worker("progress.check".to_owned(), CHECK_PAUSE);
        let (progress, db, check) = (self.clone(), runtime.db().clone(), Check::default());
        runtime.spawn(async move { worker.run(|| check.run_once(&progress, &db)).await });

        let worker = runtime.worker("progress.deletion".to_owned(), DELETION_PAUSE);
        let worker = Worker { wake: self.deletions.clone(), ..worker };
        let (progress, db) = (self.clone(), runtime.db().clone());
        runtime.spawn(async move { worker.run(|| flow::deletion::delete_ownerless(&progress, &db)).await });

        let worker = runtime.worker("progress.retention".to_owned(), RETENTION_PAUSE);
        let (db, retention) = (runtime.db().clone(), self.retention);
        runtime.spawn(async move { worker.run(|| maintain(db.pool(), workers::delete_old(&db, retention))).await });
    }
}
