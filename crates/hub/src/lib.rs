//! The hub: webhooks, ordered, signed and retried.

pub mod address;
pub mod client;
mod content;
mod dial;
pub mod domain;
mod error;
mod fields;
mod flow;
pub mod headers;
mod http;
pub mod signature;
mod store;
pub mod target;
mod view;

use kit::clock::Clock;
use kit::page::CursorKey;
use kit::secret::Seal;
use mailbox::watch::Watcher;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use utoipa_axum::router::OpenApiRouter;

use crate::address::Allowed;
use crate::client::{Client, ClientSettings};

/// What the hub's rooms share.
#[derive(Clone)]
pub struct Hub {
    pub(crate) db: PgPool,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) seal: Seal,
    pub(crate) client: Client,
    pub(crate) watcher: Watcher,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HubSettings {
    /// Networks that webhooks may go to although they are not public.
    pub allowed_networks: Option<Allowed>,
    pub https_only: bool,
}

impl HubSettings {
    /// What is wrong with them, if anything: the setting and what it takes.
    pub fn client(&self) -> Result<Client, (&'static str, String)> {
        let allowed_networks = self.allowed_networks.clone().unwrap_or_default();
        let settings = ClientSettings { allowed_networks, https_only: self.https_only, ..ClientSettings::default() };
        Client::new(settings).map_err(|error| ("hub", error))
    }
}

impl Hub {
    pub fn new(db: PgPool, clock: Clock, cursor_key: CursorKey, seal: Seal, client: Client, watcher: Watcher) -> Hub {
        Hub { db, clock, cursor_key, seal, client, watcher }
    }
}

/// All of its routes.
pub fn router() -> OpenApiRouter<Hub> {
    http::router()
}
