//! Looks up the caller of an API key or a portal token, through a short-lived cache: there may be thousands of requests per second.

use std::sync::Arc;

use http_kit::auth::{Caller, KeyLookup, KeyStore, Principal, Role, TenantLookup};
use moka::future::Cache;
use pillarbox::database::Database;
use pillarbox::log::{Tenant, TenantStanding};
use runtime::secret::{Secret, digest};
use uuid::Uuid;

use crate::keys::{self, CACHE_TIME};
use crate::tenants::flow::standing;

/// Largest number of cached lookups.
const CACHE_ENTRIES_MAX: u64 = 10_000;

/// The key store of the authentication layer.
#[derive(Clone)]
pub(crate) struct KeyCache {
    db: Database,
    /// The digest of the admin key from the settings.
    admin_key: Option<[u8; 32]>,
    /// Callers by the digest of their key. Unknown keys are cached too, so that guessing keys does not load the database.
    callers: Cache<[u8; 32], Option<Caller>>,
    /// The tenants that keys of the tenant `main` have acted for. Unknown ones are not cached, so that a new tenant can be used
    /// at once.
    tenants: Cache<Tenant, TenantStanding>,
}

impl KeyCache {
    pub(crate) fn new(db: Database, admin_key: Option<&Secret<String>>) -> KeyCache {
        let callers = Cache::builder().max_capacity(CACHE_ENTRIES_MAX).time_to_live(CACHE_TIME).build();
        let tenants = Cache::builder().max_capacity(CACHE_ENTRIES_MAX).time_to_live(CACHE_TIME).build();
        KeyCache { db, admin_key: admin_key.map(|key| digest(key.reveal())), callers, tenants }
    }

    /// Empties the cache, so that a key that this process revokes, or whose tenant it suspends, is refused at once.
    pub(crate) fn clear(&self) {
        self.callers.invalidate_all();
        self.tenants.invalidate_all();
    }

    async fn load(&self, digest: [u8; 32]) -> Result<Option<Caller>, sqlx::Error> {
        keys::flow::find_caller(&mut *self.db.acquire().await?, digest).await
    }
}

impl KeyStore for KeyCache {
    fn is_cached(&self, digest: &[u8; 32]) -> bool {
        self.admin_key.as_ref() == Some(digest) || self.callers.contains_key(digest)
    }

    fn find(&self, digest: [u8; 32]) -> KeyLookup<'_> {
        Box::pin(async move {
            // Digests may be compared in variable time: knowing part of a digest does not help to find the key.
            if self.admin_key == Some(digest) {
                let principal = Principal::Key(Uuid::nil());
                return Ok(Some(Caller::new(principal, Tenant::main(), Some(Role::Admin))));
            }
            if let Some(found) = self.callers.get(&digest).await {
                return Ok(found);
            }
            // Boxed, because it is rare and large: every request would allocate and copy it.
            let found = Box::pin(self.callers.try_get_with(digest, self.load(digest))).await;
            found.map_err(|error: Arc<sqlx::Error>| http_kit::database::problem(&error))
        })
    }

    fn standing<'a>(&'a self, tenant: &'a Tenant) -> TenantLookup<'a> {
        Box::pin(async move {
            if let Some(known) = self.tenants.get(tenant).await {
                return Ok(Some(known));
            }
            let found = standing(&self.db, tenant).await.map_err(|error| http_kit::database::problem(&error))?;
            if let Some(found) = found {
                self.tenants.insert(tenant.clone(), found).await;
            }
            Ok(found)
        })
    }
}
