//! Looks up the caller of an API key, through a short-lived cache: there may be thousands of requests per second.

use std::sync::Arc;
use std::time::Duration;

use kit::auth::{Caller, KeyLookup, KeyStore, Principal, Role, Tenant};
use kit::secret::{Secret, digest};
use moka::future::Cache;
use sqlx::PgPool;
use uuid::Uuid;

use super::store;

/// How long a lookup is cached. A key that another process revokes is refused here after this time at the latest.
const CACHE_TIME: Duration = Duration::from_secs(2);
/// Largest number of cached lookups.
const CACHE_ENTRIES_MAX: u64 = 10_000;

/// The key store of the authentication layer.
#[derive(Clone)]
pub(crate) struct KeyCache {
    db: PgPool,
    /// The digest of the admin key from the settings.
    admin_key: Option<[u8; 32]>,
    /// Callers by the digest of their key. Unknown keys are cached too, so that guessing keys does not load the database.
    callers: Cache<[u8; 32], Option<Caller>>,
}

impl KeyCache {
    pub(crate) fn new(db: PgPool, admin_key: Option<&Secret<String>>) -> KeyCache {
        let callers = Cache::builder().max_capacity(CACHE_ENTRIES_MAX).time_to_live(CACHE_TIME).build();
        KeyCache { db, admin_key: admin_key.map(|key| digest(key.reveal())), callers }
    }

    /// Empties the cache, so that a key that this process revokes is refused at once.
    pub(crate) fn clear(&self) {
        self.callers.invalidate_all();
    }

    async fn load(&self, digest: [u8; 32]) -> Result<Option<Caller>, sqlx::Error> {
        let key = store::find_valid(&mut *self.db.acquire().await?, digest).await?;
        Ok(key.map(|key| Caller {
            principal: Principal::Key(key.id),
            tenant: key.tenant,
            role: Some(key.role),
            session: None,
        }))
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
                return Ok(Some(Caller { principal, tenant: Tenant::main(), role: Some(Role::Admin), session: None }));
            }
            let found = self.callers.try_get_with(digest, self.load(digest)).await;
            found.map_err(|error: Arc<sqlx::Error>| mailbox::database::problem(&error))
        })
    }
}
