//! The hub: webhooks, ordered, signed and retried.
//!
//! An event is posted to the log ([`ingest`](Hub)); fan-out, a cursor over the log, makes a message for each subscriber that it
//! is for; a dispatcher sends them, lane by lane, and keeps what came of it.
//!
//! Owns the schema `pillarbox_hub`: subscribers and their secrets; messages (appended by fan-out alone), attempts and
//! positions (appended by dispatchers); lanes that wait, dead letters and commands, which are few.
//!
//! Messages in: source `hub` (events of all tenants), `hub.control` (what people want done with messages), and of the services
//! what [`Export`] says (events of the tenant `main`). Out: none.
//!
//! What holds: a lane's messages are sent one after the other, in the order in which their events were posted, the next
//! only when the one before is delivered or dead. A message that is posted is delivered, or is seen as waiting or dead. A
//! restart sends again only what was under way. Nothing of one tenant goes to another's subscriber.

pub mod address;
mod aside;
pub mod client;
mod dial;
mod dispatch;
pub mod domain;
mod error;
mod export;
mod fanout;
mod fields;
mod flow;
pub mod headers;
mod http;
mod ingest;
pub mod signature;
mod store;
pub mod target;
mod view;
mod wire;
mod workers;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kit::batch::Batcher;
use kit::clock::Clock;
use kit::page::CursorKey;
use kit::secret::Seal;
use mailbox::cursor::{Cursor, Kind, Start};
use mailbox::maintain::Keep;
use mailbox::own::OwnConnection;
use mailbox::runtime::{Rhythm, Runtime};
use mailbox::watch::Watcher;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::sync::{Mutex, mpsc};
use utoipa_axum::router::OpenApiRouter;

use crate::address::Allowed;
pub use crate::aside::set_aside;
use crate::client::{Client, ClientSettings};
use crate::dispatch::Dispatcher;
pub use crate::export::Export;
use crate::fanout::FanOut;
use crate::ingest::Ingest;

/// Events that fan-out takes at a time; some times as many while it is behind.
const FAN_OUT_BATCH: u32 = 500;
/// Batches that fan-out may be ahead of a dispatcher in the same process.
const HANDED_OVER_MAX: usize = 64;

const MAINTAIN_PAUSE: Duration = Duration::from_secs(600);
const MEASURE_PAUSE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HubSettings {
    /// Networks that webhooks may go to although they are not public, such as `10.1.0.0/16`. Absent: none, but loopback
    /// for an instance with a PostgreSQL of its own, so that it can be tried on one machine.
    pub allowed_networks: Option<Allowed>,
    pub https_only: bool,
    /// Webhooks leave through this proxy: `http://[user:password@]host:port`.
    pub egress_proxy: Option<kit::secret::Secret<String>>,
    /// How long every attempt is kept.
    pub attempt_days: u32,
    /// How long a dead letter can be retried.
    pub dead_letter_days: u32,
    /// Topics of the services that are events here, too, for the tenant `main`: `["event.*", "join.*"]`.
    pub export: Export,
}

impl Default for HubSettings {
    fn default() -> HubSettings {
        HubSettings {
            allowed_networks: None,
            https_only: false,
            egress_proxy: None,
            attempt_days: 30,
            dead_letter_days: 90,
            export: Export::default(),
        }
    }
}

impl HubSettings {
    /// What is wrong with them, if anything: the setting and what it takes.
    pub fn client(&self, tries_on_this_machine: bool) -> Result<Client, (&'static str, String)> {
        let proxy = match &self.egress_proxy {
            Some(proxy) => Some(proxy.reveal().parse().map_err(|error| ("hub.egress_proxy", error))?),
            None => None,
        };
        let otherwise = || if tries_on_this_machine { Allowed::loopback() } else { Allowed::default() };
        let allowed_networks = self.allowed_networks.clone().unwrap_or_else(otherwise);
        let settings =
            ClientSettings { allowed_networks, https_only: self.https_only, proxy, ..ClientSettings::default() };
        Client::new(settings).map_err(|error| ("hub", error))
    }
}

/// What its routes share.
pub struct Hub {
    pub(crate) db: PgPool,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) seal: Seal,
    pub(crate) client: Client,
    pub(crate) watcher: Watcher,
    pub(crate) ingest: Batcher<Ingest>,
    pub(crate) export: Export,
}

impl Hub {
    /// The hub, and the loop that takes events for it, which ends when the hub is dropped.
    pub fn new(
        db: PgPool,
        clock: Clock,
        cursor_key: CursorKey,
        seal: Seal,
        client: Client,
        watcher: Watcher,
        export: Export,
    ) -> (Hub, impl Future<Output = ()> + Send) {
        let handler = Ingest { db: OwnConnection::new(db.clone()), clock: clock.clone(), watcher: watcher.clone() };
        let (ingest, taking) = Batcher::new(handler, ingest::LIMITS);
        (Hub { db, clock, cursor_key, seal, client, watcher, ingest, export }, taking)
    }

    /// Looks after the hub's tables, and measures them.
    pub fn maintain(&self, runtime: &Runtime, keep: Keep, settings: &HubSettings) {
        let keep =
            workers::Kept { log: keep, attempts: settings.attempt_days, dead_letters: settings.dead_letter_days };
        let (worker, db, clock) =
            (runtime.worker("hub.maintain".to_owned(), MAINTAIN_PAUSE), runtime.db().clone(), self.clock.clone());
        runtime.spawn(async move { worker.run(|| workers::maintain(&db, keep, clock.now())).await });
        let (worker, db) = (runtime.worker("hub.measure".to_owned(), MEASURE_PAUSE), runtime.db().clone());
        runtime.spawn(async move { worker.run(|| workers::measure(&db)).await });
    }

    /// Makes messages, sends them, or both.
    pub fn start(&self, runtime: &Runtime, fans_out: bool, dispatches: bool) {
        let (handing_over, handed_over) = mpsc::channel(HANDED_OVER_MAX);
        if fans_out {
            let cursor = Cursor {
                consumer: "hub.fanout".to_owned(),
                kind: Kind::Handler,
                filter: self.export.filter(&[fanout::SOURCE, fanout::CONTROL]),
                start: Start::Beginning,
            };
            let mut rhythm = Rhythm::default();
            (rhythm.lane.batch, rhythm.lane.in_step) = (FAN_OUT_BATCH, true);
            runtime.consume(&cursor, rhythm, || FanOut::new(self.clock.clone(), handing_over.clone()));
        }
        if dispatches {
            let dispatcher = Dispatcher::new(
                runtime.db().clone(),
                self.clock.clone(),
                self.client.clone(),
                self.seal.clone(),
                runtime.share("hub.dispatch"),
                runtime.watcher().clone(),
                handed_over,
            );
            let worker = runtime.worker("hub.dispatch".to_owned(), Duration::from_millis(100));
            runtime.spawn(async move {
                let dispatcher = Mutex::new(dispatcher);
                worker.run(async || dispatcher.lock().await.round().await).await;
                dispatcher.into_inner().close().await;
            });
        }
    }
}

/// All of its routes.
pub fn router() -> OpenApiRouter<Arc<Hub>> {
    http::router()
}
