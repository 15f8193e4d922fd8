//! Identity: accounts of users, their sessions, and their subscriptions to paid plans.
//!
//! Owns the schema `pillarbox_identity`: accounts, sessions with their refresh tokens, tokens that are sent by e-mail,
//! accepted requests, counts of attempts, known networks, subscriptions, and an audit trail without personal data.
//!
//! Publishes messages of source `identity` with the user's id as key: `email.*`, requests for e-mails, and
//! `account.contact_changed`, the verified address, which are confidential; `account.deleted`; `subscription.created`, `subscription.cancelled` and `subscription.status_changed`. Consumes none.
//!
//! Invariants: of a password only the Argon2id hash is stored, of a token only the SHA-256. Neither the answer nor the time of
//! registration, sign-in and requests for e-mails reveals whether an address has an account. An address that was registered
//! twice before its verification has no password until its owner sets one. A session has one current
//! refresh token; a replaced one that is presented again ends the session. Every route that needs an account checks in the
//! database that the session lives, so the token of a session that has ended is refused at once here, and elsewhere when it
//! expires, at most 5 minutes later. A deleted account leaves nothing but its id in the audit trail.

mod common_passwords;
mod domain;
mod error;
mod fields;
mod flow;
mod hash_pool;
mod http;
mod secrets;
mod settings;
mod store;
mod view;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use http_kit::auth::{TokenSigner, TokenVerifier};
use http_kit::page::CursorKey;
use pillarbox::consumers::Runtime;
use pillarbox::database::time::maintain;
use pillarbox::database::{Database, SchemaMigrations};
use runtime::MetricHelp;
use runtime::clock::Clock;
use runtime::config::InvalidSetting;
use service::{Role, Roles, Service, ServiceContext};
use tokio_util::task::TaskTracker;
use utoipa_axum::router::OpenApiRouter;

pub use crate::domain::Role as UserRole;
pub use crate::flow::contact::announce_all_again;
pub use crate::flow::role::{SetRoleError, set_role};
pub use crate::settings::IdentitySettings;

use crate::hash_pool::HashPool;
use crate::secrets::DigestKey;

/// The migrations of the schema `pillarbox_identity`.
pub const MIGRATIONS: SchemaMigrations = SchemaMigrations {
    schema: "pillarbox_identity",
    texts: &[include_str!("../migrations/0001_pillarbox_identity.sql")],
};

/// Pause between two checks for accepted requests that no process has processed.
const REQUEST_PAUSE: Duration = Duration::from_secs(5);
/// Pause between two checks for expired rows.
const EXPIRY_PAUSE: Duration = Duration::from_secs(60);

/// Pause between two checks for accounts that an operator wants to be announced again.
const CONTACTS_PAUSE: Duration = Duration::from_secs(10);

/// The identity service of one process.
#[derive(Clone)]
pub struct Identity {
    pub(crate) db: Database,
    pub(crate) clock: Clock,
    pub(crate) cursor_key: CursorKey,
    pub(crate) signer: TokenSigner,
    pub(crate) tokens: Arc<TokenVerifier>,
    pub(crate) public_url: Option<String>,
    pub(crate) hashes: Arc<HashPool>,
    pub(crate) digests: DigestKey,
    /// The tasks that continue after the answer of their request. The process waits for them when it stops.
    pub(crate) tasks: TaskTracker,
    pub(crate) settings: IdentitySettings,
}

impl Service for Identity {
    const NAME: &'static str = "identity";
    const DESCRIPTION: &'static str = "Accounts, sessions and subscriptions. Anyone may register and sign in; what concerns an account requires the access \
         token of its user, and not a token of `pillarbox token` or of another issuer. Admins of the tenant `main` manage \
         the roles of users and the statuses of subscriptions.";
    const METRICS: &'static [MetricHelp] = &[
        ("pillarbox_identity_logins_total", "Sign-ins by outcome."),
        ("pillarbox_identity_throttled_total", "Requests that were refused because a limit was reached."),
        ("pillarbox_identity_hash_refused_total", "Hashes of passwords that were refused because the queue was full."),
        ("pillarbox_identity_reused_tokens_total", "Sessions that ended because a refresh token was used again."),
    ];
    const MIGRATIONS: SchemaMigrations = MIGRATIONS;
    type Settings = IdentitySettings;

    fn check(settings: &IdentitySettings) -> Result<(), InvalidSetting> {
        settings.check()
    }

    fn build(context: &ServiceContext, settings: &IdentitySettings) -> Result<Identity, InvalidSetting> {
        let hashes = HashPool::start(settings.hash_params()?, settings.hash_threads, settings.hash_queue_max);
        let hashes = hashes.map_err(|error| {
            InvalidSetting::new("identity.hash_threads", format!("so many threads cannot be started: {error}"))
        })?;
        Ok(Identity {
            db: context.db.clone(),
            clock: context.clock.clone(),
            cursor_key: context.cursor_key.clone(),
            signer: context.token_signer.clone(),
            tokens: context.token_verifier.clone(),
            public_url: context.public_url.clone(),
            hashes: Arc::new(hashes),
            digests: DigestKey::new(context.derived_key("identity digest")),
            tasks: context.tasks().clone(),
            settings: settings.clone(),
        })
    }

    fn routes() -> OpenApiRouter<Arc<Identity>> {
        http::router()
    }

    fn start_workers(&self, runtime: &Runtime, roles: &Roles) {
        if !roles.contains(Role::Api) {
            return;
        }
        let worker = runtime.worker("identity.requests".to_owned(), REQUEST_PAUSE);
        let (identity, db) = (self.clone(), runtime.db().clone());
        runtime.spawn(async move { worker.run(|| flow::request::process_due(&identity, &db)).await });
    }

    fn start_maintenance(&self, runtime: &Runtime) {
        let worker = runtime.worker("identity.expiry".to_owned(), EXPIRY_PAUSE);
        let (db, digests) = (runtime.db().clone(), self.digests.clone());
        let unverified = TimeDelta::days(i64::from(self.settings.unverified_days));
        runtime.spawn(async move {
            worker.run(|| maintain(db.pool(), workers::delete_expired(&db, &digests, unverified))).await;
        });
        let worker = runtime.worker("identity.contacts".to_owned(), CONTACTS_PAUSE);
        let db = runtime.db().clone();
        runtime.spawn(async move { worker.run(|| maintain(db.pool(), flow::contact::announce_known(&db))).await });
    }
}
