//! Finding the caller behind a key, thousands of times a second: the database is asked once in a while, not each time.

use std::sync::Arc;
use std::time::Duration;

use kit::auth::{Caller, KeyStore, Looking, Principal, Role, Tenant};
use kit::clock::Clock;
use kit::secret::{Secret, digest};
use moka::future::Cache;
use sqlx::PgPool;
use uuid::Uuid;

use super::store;

/// A key revoked through another process is refused everywhere after this long at the latest.
const REMEMBERED_FOR: Duration = Duration::from_secs(2);
const REMEMBERED_MAX: u64 = 10_000;

#[derive(Clone)]
pub(crate) struct KeyRing {
    db: PgPool,
    clock: Clock,
    /// Digest of the admin key from the settings.
    given: Option<[u8; 32]>,
    /// Unknown keys too, so that guessing does not reach the database each time.
    remembered: Cache<[u8; 32], Option<Caller>>,
}

impl KeyRing {
    pub(crate) fn new(db: PgPool, clock: Clock, admin_key: Option<&Secret<String>>) -> KeyRing {
        let remembered = Cache::builder().max_capacity(REMEMBERED_MAX).time_to_live(REMEMBERED_FOR).build();
        KeyRing { db, clock, given: admin_key.map(|key| digest(key.reveal())), remembered }
    }

    /// So that a key revoked through this process is refused at once.
    pub(crate) fn forget_all(&self) {
        self.remembered.invalidate_all();
    }

    async fn look_up(&self, digest: [u8; 32]) -> Result<Option<Caller>, sqlx::Error> {
        let key = store::find_good(&mut *self.db.acquire().await?, digest, self.clock.now()).await?;
        Ok(key.map(|key| Caller { principal: Principal::Key(key.id), tenant: key.tenant, role: Some(key.role) }))
    }
}

impl KeyStore for KeyRing {
    fn is_at_hand(&self, digest: &[u8; 32]) -> bool {
        self.given.as_ref() == Some(digest) || self.remembered.contains_key(digest)
    }

    fn find(&self, digest: [u8; 32]) -> Looking<'_> {
        Box::pin(async move {
            // Comparing digests leaks nothing: what an attacker learns of one says nothing of the key.
            if self.given == Some(digest) {
                let principal = Principal::Key(Uuid::nil());
                return Ok(Some(Caller { principal, tenant: Tenant::main(), role: Some(Role::Admin) }));
            }
            let found = self.remembered.try_get_with(digest, self.look_up(digest)).await;
            found.map_err(|error: Arc<sqlx::Error>| mailbox::database::problem(&error))
        })
    }
}
