//! The service of operators: tenants, API keys, portal tokens, the audit trail, and the operator API.
//!
//! - [`tenants`]: the customers of the installation. [`keys`]: API keys. [`portal_tokens`]: short-lived tokens of a tenant.
//! - `key_cache`: finds the caller of a key or a token. `caller`: tells callers what their credentials allow.
//! - [`audit`]: which operator acted for which tenant. `rate_exchange`: rate limits that processes share.
//! - [`operator`]: the log, its consumers, parked messages, dead letters and replays. `overview`: the installation at a glance.
//!
//! Owns the schema `pillarbox_admin`, and manages the table `pillarbox.tenant` of the log. It neither posts messages nor
//! consumes them. The hub and the notify service count what they have given up, and `overview` asks them; a change of a tenant
//! reaches the hub in the same transaction.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails"))]

pub mod audit;
mod caller;
mod http;
mod key_cache;
pub mod keys;
pub mod operator;
mod overview;
pub mod portal_tokens;
mod rate_exchange;
pub mod schemas;
pub mod tenants;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use http_kit::admission::limit::RateLimits;
use http_kit::auth::KeyStore;
use http_kit::page::CursorKey;
use pillarbox::consumers::Runtime;
use pillarbox::database::{Database, SchemaMigrations};
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use runtime::health::Health;
use runtime::secret::Secret;
use service::{Role, Roles, Service, ServiceContext};
use utoipa_axum::router::OpenApiRouter;

use audit::AuditTrail;
use key_cache::KeyCache;
use overview::OverviewCache;
use tenants::flow::{DeleteTenantRows, Propagation};

/// The OpenAPI tag of the operator API.
pub const OPERATOR_TAG: &str = "operator";
pub const OPERATOR_DESCRIPTION: &str = "The log and its consumers. Requires the role `admin` in the tenant `main`.";

/// What this service needs from the program besides the context.
pub struct Options {
    /// The admin key of the settings.
    pub admin_key: Option<Secret<String>>,
    /// How many days the audit trail is retained.
    pub audit_days: u32,
    /// How long a change of a tenant waits at most until it holds everywhere.
    pub change_wait: Duration,
    /// The checks of this process, which the overview shows.
    pub health: Health,
    /// How each service deletes what a deleted tenant has in its tables.
    pub tenant_rows: Vec<DeleteTenantRows>,
    /// The consumers of the default routes to which no queue has to be bound.
    pub optional_routes: Vec<String>,
}

/// The service in one process.
pub struct Administration {
    db: Database,
    clock: Clock,
    cursor_key: CursorKey,
    keys: KeyCache,
    audit_trail: AuditTrail,
    audit_days: u32,
    rate_limits: RateLimits,
    propagation: Propagation,
    tenant_rows: Vec<DeleteTenantRows>,
    optional_routes: Vec<String>,
    health: Health,
    overview: OverviewCache,
}

impl Administration {
    /// The routes that are of use only in a process that runs the hub, which accepts portal tokens.
    pub fn hub_routes() -> OpenApiRouter<Arc<Administration>> {
        http::hub_router()
    }

    /// Finds the callers of API keys and portal tokens.
    pub fn key_store(&self) -> Arc<dyn KeyStore> {
        Arc::new(self.keys.clone())
    }

    /// Records the requests of operators who act for a tenant.
    pub fn audit_trail(&self) -> &AuditTrail {
        &self.audit_trail
    }
}

impl Service for Administration {
    const NAME: &'static str = "admin";
    const DESCRIPTION: &'static str = "API keys, tenants and the audit trail. Requires the role `admin`, from an API key or an \
                                       operator's token; for tenants and the audit trail in the tenant `main`.";
    const MIGRATIONS: SchemaMigrations = SchemaMigrations {
        schema: "pillarbox_admin",
        texts: &[include_str!("../migrations/0001_pillarbox_admin.sql")],
    };
    type Settings = Options;

    fn build(context: &ServiceContext, options: &Options) -> Result<Administration, InvalidSetting> {
        let db = context.db.clone();
        let keys = KeyCache::new(db.clone(), options.admin_key.as_ref());
        let dropped = keys.clone();
        db.on_invalidation(move || dropped.clear());
        let (audit_trail, write_audit_trail) = AuditTrail::new(&db, context.clock.clone());
        context.spawn(write_audit_trail);
        Ok(Administration {
            db,
            clock: context.clock.clone(),
            cursor_key: context.cursor_key.clone(),
            keys,
            audit_trail,
            audit_days: options.audit_days,
            rate_limits: context.rate_limits.clone(),
            propagation: Propagation { lease_time: context.lease_time, time_max: options.change_wait },
            tenant_rows: options.tenant_rows.clone(),
            optional_routes: options.optional_routes.clone(),
            health: options.health.clone(),
            overview: OverviewCache::default(),
        })
    }

    fn routes() -> OpenApiRouter<Arc<Administration>> {
        http::router()
    }

    fn start_workers(&self, runtime: &Runtime, roles: &Roles) {
        if roles.contains(Role::Api) {
            workers::start_rate_exchange(runtime, self.rate_limits.clone());
        }
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        workers::start_removal(runtime, self.audit_days, self.tenant_rows.clone());
    }
}
