//! The catalogues as ingest uses them: loaded once per process, and again when they have changed.
//!
//! A process may use what it has loaded for [`VALID_TIME`] after its last check began. The response to a change waits that long
//! after its commit, so every request that arrives later is checked against the change. While events arrive, checks run in the
//! background, at most one per [`CHECK_PAUSE`], so that no request waits for one; without events there are none. A tenant
//! without a catalogue costs a lookup in memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use kit::auth::Tenant;
use kit::boot_time::BootTime;
use kit::gates::Gates;
use kit::problem::{FieldError, Problem};
use mailbox::database::{Database, problem};
use mailbox::log::Post;
use serde_json::Value;
use tokio::sync::{Mutex, OnceCell};
use uuid::Uuid;

use super::schema::Schema;
use super::validator::Validator;
use super::{CatalogueSettings, UnknownTypes};
use crate::store::catalogue as store;

/// How long a process may use the catalogues without asking whether they have changed.
pub(crate) const VALID_TIME: Duration = Duration::from_millis(300);
/// How old a check is when the next one begins in the background.
const CHECK_PAUSE: Duration = Duration::from_millis(100);
/// The cost ([`Schema::cost`] times bytes) up to which the payloads of a request are checked on the thread of the request. More
/// would block it for more than some milliseconds.
const INLINE_COST_MAX: usize = 500_000;
/// The cost of one payload that is accepted. More would take more than some seconds.
const PAYLOAD_COST_MAX: usize = 300_000_000;
/// The total size of a tenant's schemas that are kept compiled. Any others are compiled again for each request.
const COMPILED_BYTES_MAX: usize = 16 * 1024 * 1024;
const UNKNOWN_TYPE: &str = "is not in the catalogue of event types: add it with POST /hub/v1/event-types, or accept unknown types \
                            with PATCH /hub/v1/catalogue";
const UNKNOWN_SHARED_TYPE: &str =
    "is not in the shared catalogue of event types of the tenant main: the operator adds types there";

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct CatalogueCache {
    db: Database,
    loaded: Arc<RwLock<Loaded>>,
    check: Arc<Mutex<()>>,
    /// Each tenant has at most one check at a time outside of the threads of requests.
    turns: Arc<Gates<Tenant>>,
}

#[derive(Clone, Default)]
struct Loaded {
    /// When the last check began. None: nothing is loaded.
    checked_at: Option<BootTime>,
    stamp: Option<Uuid>,
    tenants: Arc<HashMap<Tenant, Arc<TenantCatalogue>>>,
}

struct TenantCatalogue {
    tenant: Tenant,
    stamp: Uuid,
    settings: CatalogueSettings,
    /// Loaded with the first event.
    types: OnceCell<HashMap<String, KnownType>>,
    /// The total size of the schemas that are kept compiled.
    compiled_bytes: AtomicUsize,
}

struct KnownType {
    /// None: every payload is accepted.
    schema: Option<Box<serde_json::value::RawValue>>,
    /// Set with the first event of the type, if the schema is kept compiled. `Some(None)`: it cannot be compiled.
    compiled: OnceLock<Option<Arc<Compiled>>>,
}

struct Compiled {
    validator: Validator,
    cost: usize,
    bytes: usize,
}

impl CatalogueCache {
    pub(crate) fn new(db: &Database) -> CatalogueCache {
        CatalogueCache { db: db.clone(), loaded: Arc::default(), check: Arc::default(), turns: Arc::new(Gates::new(1)) }
    }

    /// Checks the events of a request. Fails with pointers into its body; `is_batch`: it has a list of events.
    pub(crate) async fn check(&self, tenant: &Tenant, posts: Vec<Post>, is_batch: bool) -> Result<Vec<Post>, Problem> {
        // What is rare and large is boxed: otherwise every request would copy the space for it.
        let applied = match self.cached(tenant) {
            Some(applied) => applied,
            None => Box::pin(self.checked(tenant)).await.map_err(|error| problem(&error))?,
        };
        match applied {
            Some(catalogue) => Box::pin(self.check_against(catalogue, tenant, posts, is_batch)).await,
            None => Ok(posts),
        }
    }

    async fn check_against(
        &self,
        catalogue: Arc<TenantCatalogue>,
        tenant: &Tenant,
        posts: Vec<Post>,
        is_batch: bool,
    ) -> Result<Vec<Post>, Problem> {
        catalogue.load(&self.db).await.map_err(|error| problem(&error))?;
        let is_cheap = catalogue.cost(&posts).is_some_and(|cost| cost <= INLINE_COST_MAX);
        let is_own = catalogue.tenant == *tenant;
        let check = move || {
            let errors = catalogue.errors(&posts, is_batch, is_own);
            if errors.is_empty() { Ok(posts) } else { Err(Problem::validation(errors)) }
        };
        if is_cheap {
            return check();
        }
        let turn = self.turns.enter(tenant).await;
        let checking = tokio::task::spawn_blocking(move || {
            let _turn = turn; // held until the check ends, even if its caller has disconnected
            check()
        });
        checking.await.map_err(|error| Problem::internal(&error))?
    }

    /// The catalogue that applies to a tenant, Some(None) if there is none. None if what is loaded is older than [`VALID_TIME`]
    /// allows.
    fn cached(&self, tenant: &Tenant) -> Option<Option<Arc<TenantCatalogue>>> {
        let now = BootTime::now();
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        let is_within = |time: Duration| loaded.checked_at.is_some_and(|at| now < at + time);
        if is_within(VALID_TIME) && !is_within(CHECK_PAUSE) {
            self.refresh_in_background();
        }
        is_within(VALID_TIME).then(|| loaded.applied(tenant))
    }

    /// The catalogue that applies to a tenant, after a check whether it has changed. None if there is none.
    async fn checked(&self, tenant: &Tenant) -> sqlx::Result<Option<Arc<TenantCatalogue>>> {
        let now = BootTime::now();
        let guard = self.check.lock().await;
        // Another request may have made the check meanwhile.
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner).clone();
        let loaded = match loaded.checked_at.is_some_and(|at| now < at + VALID_TIME) {
            true => loaded,
            false => self.refresh(loaded).await?,
        };
        drop(guard);
        Ok(loaded.applied(tenant))
    }

    fn refresh_in_background(&self) {
        let Ok(guard) = self.check.clone().try_lock_owned() else { return };
        let cache = self.clone();
        tokio::spawn(async move {
            let loaded = cache.loaded.read().unwrap_or_else(PoisonError::into_inner).clone();
            // After a failure, a later request makes the check itself and reports the error.
            if let Err(error) = cache.refresh(loaded).await {
                tracing::debug!(%error, "cannot check whether event types have changed");
            }
            drop(guard);
        });
    }

    async fn refresh(&self, mut loaded: Loaded) -> sqlx::Result<Loaded> {
        loaded.checked_at = Some(BootTime::now());
        let mut db = self.db.acquire().await?;
        let stamp = store::stamp(&mut db).await?;
        if loaded.stamp != Some(stamp) {
            let unchanged = |tenant: &Tenant, stamp: Uuid| {
                loaded.tenants.get(tenant).filter(|catalogue| catalogue.stamp == stamp).cloned()
            };
            let catalogues = store::catalogues(&mut db).await?.into_iter();
            let tenants = catalogues.map(|(tenant, settings, stamp)| {
                let new = || TenantCatalogue::new(tenant.clone(), stamp, settings);
                let catalogue = unchanged(&tenant, stamp).unwrap_or_else(|| Arc::new(new()));
                (tenant, catalogue)
            });
            (loaded.tenants, loaded.stamp) = (Arc::new(tenants.collect()), Some(stamp));
        }
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded.clone();
        Ok(loaded)
    }
}

impl Loaded {
    /// The catalogue of the tenant itself, or else the shared one.
    fn applied(&self, tenant: &Tenant) -> Option<Arc<TenantCatalogue>> {
        let shared = || self.tenants.get(&Tenant::main()).filter(|catalogue| catalogue.settings.is_shared);
        self.tenants.get(tenant).or_else(shared).cloned()
    }
}

impl TenantCatalogue {
    fn new(tenant: Tenant, stamp: Uuid, settings: CatalogueSettings) -> TenantCatalogue {
        TenantCatalogue { tenant, stamp, settings, types: OnceCell::new(), compiled_bytes: AtomicUsize::new(0) }
    }

    /// What the check of these posts costs at most. None if one of their schemas is not compiled yet.
    fn cost(&self, posts: &[Post]) -> Option<usize> {
        let types = self.types.get()?;
        let cost = |post: &Post| match types.get(&post.topic) {
            Some(KnownType { schema: Some(_), compiled }) => {
                Some(compiled.get()?.as_ref().map_or(0, |compiled| compiled.cost_of(post)))
            }
            Some(KnownType { schema: None, .. }) | None => Some(0),
        };
        posts.iter().map(cost).try_fold(0_usize, |sum, cost| Some(sum.saturating_add(cost?)))
    }

    /// Loads the types, unless they are.
    async fn load(&self, db: &Database) -> sqlx::Result<()> {
        let load = || async {
            let types = store::applied_schemas(&mut *db.acquire().await?, &self.tenant).await?;
            let known = |(name, schema)| (name, KnownType { schema, compiled: OnceLock::new() });
            Ok::<_, sqlx::Error>(types.into_iter().map(known).collect())
        };
        self.types.get_or_try_init(load).await.map(drop)
    }

    /// What is wrong with the posts of a tenant. `is_own`: the catalogue is that of the tenant itself.
    fn errors(&self, posts: &[Post], is_batch: bool, is_own: bool) -> Vec<FieldError> {
        let Some(types) = self.types.get() else { return Vec::new() };
        let mut errors = Vec::new();
        for (at, post) in posts.iter().enumerate() {
            let pointer = if is_batch { format!("/events/{at}") } else { String::new() };
            match types.get(&post.topic) {
                Some(known) => errors.extend(known.errors(post, &pointer, &self.compiled_bytes)),
                None if self.settings.unknown_types == UnknownTypes::Refuse => {
                    let detail = if is_own { UNKNOWN_TYPE } else { UNKNOWN_SHARED_TYPE };
                    errors.push(FieldError::body(format!("{pointer}/event_type"), detail));
                }
                None => {}
            }
        }
        errors
    }
}

impl KnownType {
    fn errors(&self, post: &Post, pointer: &str, compiled_bytes: &AtomicUsize) -> Vec<FieldError> {
        let Some(compiled) = self.compiled(&post.topic, compiled_bytes) else { return Vec::new() };
        let pointer = format!("{pointer}/payload");
        if compiled.cost_of(post) > PAYLOAD_COST_MAX {
            let detail = format!(
                "is too large for its schema, which has a cost of {}: send at most {} bytes, or simplify the schema",
                compiled.cost,
                PAYLOAD_COST_MAX / compiled.cost
            );
            return vec![FieldError::body(pointer, detail)];
        }
        match serde_json::from_str::<Value>(post.payload.get()) {
            Ok(payload) => compiled.validator.errors(&payload, &pointer),
            Err(_) => {
                let detail = "cannot be checked against its schema: it must not be nested more than 127 levels deep, nor have \
                              numbers beyond double precision or incomplete surrogate pairs";
                vec![FieldError::body(pointer, detail)]
            }
        }
    }

    /// Returns the compiled schema; None if there is none, or it cannot be compiled. It is kept unless `compiled_bytes`, the total
    /// size of those that are kept, would exceed its limit.
    fn compiled(&self, topic: &str, compiled_bytes: &AtomicUsize) -> Option<Arc<Compiled>> {
        let schema = self.schema.as_ref()?;
        if let Some(compiled) = self.compiled.get() {
            return compiled.clone();
        }
        let compiled = Compiled::new(schema)
            .inspect_err(|error| {
                tracing::error!(event_type = topic, error, "a stored schema cannot be applied, so it is not enforced");
            })
            .ok()
            .map(Arc::new);
        let bytes = compiled.as_ref().map_or(0, |compiled| compiled.bytes);
        let is_within = compiled_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes <= COMPILED_BYTES_MAX;
        if !is_within || self.compiled.set(compiled.clone()).is_err() {
            compiled_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        compiled
    }
}

impl Compiled {
    fn new(schema: &serde_json::value::RawValue) -> Result<Compiled, String> {
        let schema = Schema::parse(schema).map_err(|errors| format!("{errors:?}"))?;
        Ok(Compiled { validator: Validator::new(&schema.rust)?, cost: schema.cost, bytes: schema.bytes })
    }

    fn cost_of(&self, post: &Post) -> usize {
        self.cost.saturating_mul(post.payload.get().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::value::RawValue;

    #[test]
    fn schemas_beyond_the_limit_of_a_tenant_do_not_stay_compiled() {
        let schema = RawValue::from_string(r#"{"type": "string"}"#.to_owned()).unwrap();
        let known = KnownType { schema: Some(schema), compiled: OnceLock::new() };
        let compiled_bytes = AtomicUsize::new(COMPILED_BYTES_MAX);
        assert!(known.compiled("order.paid", &compiled_bytes).is_some() && known.compiled.get().is_none());
        assert_eq!(compiled_bytes.load(Ordering::Relaxed), COMPILED_BYTES_MAX);
        compiled_bytes.store(0, Ordering::Relaxed);
        let found = known.compiled("order.paid", &compiled_bytes).unwrap();
        assert!(known.compiled.get().is_some());
        assert_eq!(compiled_bytes.load(Ordering::Relaxed), found.bytes);
        known.compiled("order.paid", &compiled_bytes);
        assert_eq!(compiled_bytes.load(Ordering::Relaxed), found.bytes, "it is counted once");
    }
}
