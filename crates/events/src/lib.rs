//! Events: made, published, found, canceled.
//!
//! Owns the schema `pillarbox_events`: events and the trail of their statuses, cities and how often they are used, the epochs
//! of what is trending, runs of reconciliation, and the generations that say whether a copy is still good.
//!
//! Messages out, source `events`, the event's id as key: `event.published`, `event.updated`, `event.unpublished`,
//! `event.canceled`, each with the event as it is and its version; `event.versions` when they are compared, and
//! `event.restated` for what differed. In, of source `joins`: `join.#` and `mod.#` with absolute counts, and `join.counted`,
//! the answer to `event.versions`.
//!
//! What holds: an event moves only along [`domain::Status::after`], one change after the other, and its trail says who did it.
//! Only its owner changes it, and only its owner sees a draft. The change, its trail and the message about it commit
//! together. A count is the one with the highest version, in whatever order it came. Who asks after a change has committed
//! does not see what was before it, in any process: a copy is checked against the database by what it was made from.

mod cache;
pub mod domain;
mod error;
mod fields;
mod flow;
mod http;
mod inbox;
mod reads;
mod store;
mod view;
mod workers;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use kit::batch::{Batcher, Limits};
use kit::clock::Clock;
use kit::page::CursorKey;
use mailbox::runtime::{Runtime, Subscription};
use mailbox::watch::Watcher;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use utoipa_axum::router::OpenApiRouter;

pub use crate::flow::reconcile;

use crate::cache::Cache;
use crate::reads::{Details, Generations};

/// How often it is looked whether a round is due.
const ROUND_PAUSE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsSettings {
    /// How often events are scored for what is trending.
    pub trending_seconds: u32,
    /// How often counts are compared with the joins service; 0: never.
    pub reconcile_minutes: u32,
}

impl Default for EventsSettings {
    fn default() -> EventsSettings {
        EventsSettings { trending_seconds: 300, reconcile_minutes: 60 }
    }
}

impl EventsSettings {
    /// What is wrong with them, if anything: the setting and what it takes.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        match (1..=86_400).contains(&self.trending_seconds) {
            true => Ok(()),
            false => Err(("events.trending_seconds", "takes a number from 1 to 86400".to_owned())),
        }
    }
}

/// Where it reads and keeps.
pub struct Stores {
    pub db: PgPool,
    /// Feeds are read here: a replica, or the same.
    pub feed_db: PgPool,
    /// A client, and what its keys begin with.
    pub redis: Option<(redis::Client, String)>,
}

/// What its routes share.
pub struct Events {
    pub(crate) db: PgPool,
    pub(crate) feed_db: PgPool,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) watcher: Watcher,
    pub(crate) cache: Cache,
    pub(crate) details: Batcher<Details>,
    pub(crate) generations: Batcher<Generations>,
}

impl Events {
    /// The service, and the loops that read for it, which end when it is dropped.
    pub fn new(
        stores: Stores,
        clock: Clock,
        cursor_key: CursorKey,
        watcher: Watcher,
    ) -> (Events, impl Future<Output = ()> + Send) {
        let Stores { db, feed_db, redis } = stores;
        let cache = Cache::new(clock.clone(), redis);
        let limits = Limits::new(500, 10_000);
        let (details, reading) = Batcher::new(Details { db: db.clone(), cache: cache.clone() }, limits);
        let (generations, looking) = Batcher::new(Generations::new(feed_db.clone()), limits);
        let events = Events { db, feed_db, clock, cursor_key, watcher, cache, details, generations };
        (events, async {
            tokio::join!(reading, looking);
        })
    }

    /// The door for messages.
    pub fn subscriptions(&self) -> Vec<Subscription> {
        inbox::subscriptions(&self.clock)
    }

    /// Starts the timed rounds.
    pub fn maintain(&self, runtime: &Runtime, settings: &EventsSettings) {
        let every = TimeDelta::seconds(i64::from(settings.trending_seconds));
        let pause = Duration::from_secs(u64::from(settings.trending_seconds)).min(ROUND_PAUSE_MAX);
        let (worker, db, clock) =
            (runtime.worker("events.trending".to_owned(), pause), runtime.db().clone(), self.clock.clone());
        runtime.spawn(async move { worker.run(|| workers::score(&db, every, clock.now())).await });
        if settings.reconcile_minutes == 0 {
            return;
        }
        let every = TimeDelta::minutes(i64::from(settings.reconcile_minutes));
        let (worker, db, clock) =
            (runtime.worker("events.reconcile".to_owned(), ROUND_PAUSE_MAX), runtime.db().clone(), self.clock.clone());
        runtime.spawn(async move { worker.run(|| workers::reconcile(&db, every, clock.now())).await });
    }

    /// Every way to ask for a feed, and how PostgreSQL would read a page of it: to see that indexes serve it.
    pub async fn feed_plans(&self) -> sqlx::Result<Vec<(String, String)>> {
        flow::feed::plans(self).await
    }
}

/// All of its routes.
pub fn router() -> OpenApiRouter<Arc<Events>> {
    http::router()
}
