//! The catalogues as ingest uses them: loaded once per process, and again when they have changed.
//!
//! A process may use what it has loaded for [`VALID_TIME`] after its last check began. The response to a change waits that long
//! after its commit, so every request that arrives later is checked against the change. While events arrive, checks run in the
//! background, at most one per [`CHECK_PAUSE`], so that no request waits for one; without events there are none. A tenant
//! without a catalogue costs a lookup in memory.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use chrono::{DateTime, Utc};
use http_kit::admission::caller_id::CallerId;
use http_kit::admission::fair_budget::{FairBudget, FairLimits, Reservation};
use http_kit::database::problem;
use http_kit::problem::{FieldError, Problem};
use pillarbox::database::Database;
use pillarbox::log::Tenant;
use pillarbox::log::{Post, payload_limits};
use runtime::boot_time::BootTime;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::{Mutex, OnceCell, Semaphore};
use uuid::Uuid;

use super::schema::Schema;
use crate::error::NoVerdict;
use crate::event_types::domain::{CatalogueSettings, UnknownTypes};
use crate::event_types::schema::steps::{Exhausted, Steps};
use crate::event_types::schema::work::{CHECK_STEPS, INLINE_STEPS, REQUEST_STEPS, SchemaWork, VERDICT_TIME_MAX};
use crate::event_types::store;
use crate::event_types::store::Catalogue;

/// How long a process may use the catalogues without asking whether they have changed.
pub(crate) const VALID_TIME: Duration = Duration::from_millis(300);
/// How old a check is when the next one begins in the background.
const CHECK_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of payloads that are parsed on the thread that asks for their verdict.
const INLINE_BYTES_MAX: usize = 16 * 1024;
/// Bytes of a payload that are parsed in one step.
const PARSED_BYTES_PER_STEP: u64 = 4;
/// Bytes of the compiled schemas that a process keeps. A tenant may have as many as are free afterwards, and room for one of the
/// largest size. Any others are compiled again for each check.
const COMPILED_BYTES: FairLimits =
    FairLimits { total: 64 * 1024 * 1024, caller_min: 1024 * 1024, caller_max: 64 * 1024 * 1024 };
/// Connections with which types and schemas are read for all requests, without a share of any caller.
const READS_MAX: usize = 2;
const UNKNOWN_TYPE: &str = "is not in the catalogue of event types: add it with POST /hub/v1/event-types, or accept unknown types \
                            with PATCH /hub/v1/catalogue";
const UNKNOWN_SHARED_TYPE: &str =
    "is not in the shared catalogue of event types of the tenant main: the operator adds types there";
const NOT_CHECKABLE: &str = "cannot be checked against its schema: it must not be nested more than 127 levels deep, nor have numbers \
                             beyond double precision or incomplete surrogate pairs";
const TOO_EXPENSIVE: &str = "is too expensive to check against the schema of its event type: send fewer list items, shorter texts or \
                             fewer events at a time, or simplify the schema";

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct CatalogueCache {
    db: Database,
    loaded: Arc<RwLock<Loaded>>,
    check: Arc<Mutex<()>>,
    work: SchemaWork,
    /// The places of [`READS_MAX`].
    reads: Arc<Semaphore>,
    /// The bytes of the schemas that are kept compiled.
    kept_bytes: Arc<FairBudget>,
}

#[derive(Clone, Default)]
pub(crate) struct Loaded {
    /// When the last check began. None: nothing is loaded.
    checked_at: Option<BootTime>,
    stamp: Option<Uuid>,
    tenants: Arc<HashMap<Tenant, Arc<TenantCatalogue>>>,
    /// The largest payloads of the tenants that have a limit.
    payload_limits: Arc<HashMap<Tenant, usize>>,
}

pub(crate) struct TenantCatalogue {
    tenant: Tenant,
    stamp: Uuid,
    settings: CatalogueSettings,
    /// Loaded with the first event.
    types: OnceCell<HashMap<String, KnownType>>,
    /// Held while a schema is read: a tenant waits for one place of [`READS_MAX`] at a time, however many types it has.
    reading: Mutex<()>,
}

struct KnownType {
    /// The version that payloads are checked against. None: every payload is accepted.
    version: Option<AppliedVersion>,
    /// Set with the first event of the type, if there is room.
    compiled: OnceLock<Compiled>,
    /// Held while it is compiled, so that it is compiled once.
    compiling: Arc<Mutex<()>>,
}

/// The result of compiling a version in force.
enum Compiled {
    Kept {
        schema: Arc<Schema>,
        _bytes: Reservation,
    },
    /// A stored schema that this version of Pillarbox cannot apply: every payload is accepted.
    NotApplicable,
}

/// A version in force.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AppliedVersion {
    pub(crate) version: i32,
    pub(crate) since: DateTime<Utc>,
}

/// Why a payload is not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The version of its event type; None if the schema is not the reason.
    pub(crate) version: Option<i32>,
    /// With pointers into the event.
    pub(crate) errors: Vec<FieldError>,
}

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    NoVerdict(#[from] NoVerdict),
}

impl From<CheckError> for Problem {
    fn from(error: CheckError) -> Problem {
        match error {
            CheckError::Database(error) => problem(&error),
            CheckError::NoVerdict(error) => error.into(),
        }
    }
}

/// An event that is checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked<'e> {
    pub(crate) topic: &'e str,
    pub(crate) payload: &'e RawValue,
}

impl<'e> From<&'e Post> for Checked<'e> {
    fn from(post: &'e Post) -> Checked<'e> {
        Checked { topic: &post.topic, payload: &post.payload }
    }
}

impl CatalogueCache {
    pub(crate) fn new(db: &Database, work: SchemaWork) -> CatalogueCache {
        let (loaded, check, kept_bytes) = (Arc::default(), Arc::default(), FairBudget::new(COMPILED_BYTES));
        CatalogueCache { db: db.clone(), loaded, check, work, reads: Arc::new(Semaphore::new(READS_MAX)), kept_bytes }
    }

    /// The same cache, which reads with other connections.
    pub(crate) fn with_database(&self, db: &Database) -> CatalogueCache {
        CatalogueCache { db: db.clone(), ..self.clone() }
    }

    /// The threads for work on schemas.
    pub(crate) fn work(&self) -> &SchemaWork {
        &self.work
    }

    /// Checks the events of a request. Fails with pointers into its body; `is_batch`: it has a list of events.
    pub(crate) async fn check(&self, tenant: &Tenant, posts: Vec<Post>, is_batch: bool) -> Result<Vec<Post>, Problem> {
        // What is rare and large is boxed: otherwise every request would copy the space for it.
        let applied = match self.cached(tenant) {
            Some(applied) => applied,
            None => Box::pin(self.current()).await.map_err(|error| problem(&error))?.applied(tenant),
        };
        match applied {
            Some(catalogue) => Box::pin(self.check_against(catalogue, tenant, posts, is_batch)).await,
            None => Ok(posts),
        }
    }

    /// Loads what is needed and checks the events, within the time of one verdict.
    async fn check_against(
        &self,
        catalogue: Arc<TenantCatalogue>,
        tenant: &Tenant,
        posts: Vec<Post>,
        is_batch: bool,
    ) -> Result<Vec<Post>, Problem> {
        let accepted = |posts, errors: Vec<FieldError>| {
            if errors.is_empty() { Ok(posts) } else { Err(Problem::validation(errors)) }
        };
        let checking = async {
            self.load(&catalogue).await?;
            if let Some(errors) = catalogue.errors_inline(tenant, &posts, is_batch) {
                return Ok(accepted(posts, errors));
            }
            let mut schemas = HashMap::new();
            for post in &posts {
                if !schemas.contains_key(&post.topic)
                    && let Some(schema) = self.schema(&catalogue, &post.topic).await?
                {
                    schemas.insert(post.topic.clone(), schema);
                }
            }
            let own = tenant.clone();
            let job = move || {
                let errors = catalogue.errors(&own, &posts, is_batch, &schemas);
                accepted(posts, errors)
            };
            Ok::<_, CheckError>(self.work.run(tenant, job).await?)
        };
        self.within_verdict_time(checking).await?
    }

    /// Loads the types of a catalogue, unless they are.
    pub(crate) async fn load(&self, catalogue: &Arc<TenantCatalogue>) -> sqlx::Result<()> {
        if catalogue.types.initialized() {
            return Ok(());
        }
        let (cache, catalogue) = (self.clone(), catalogue.clone());
        let task = async move {
            // One place for each catalogue: the requests that wait for the same types hold none.
            let _turn = catalogue.reading.lock().await;
            if catalogue.types.initialized() {
                return Ok(());
            }
            let _place = cache.reads.acquire().await;
            catalogue.load(&cache.db).await
        };
        for_all(task).await?
    }

    /// The compiled schema that an event of this type is checked against; None if there is none.
    async fn schema(&self, catalogue: &Arc<TenantCatalogue>, topic: &str) -> Result<Option<Arc<Schema>>, CheckError> {
        let known = catalogue.types.get().and_then(|types| types.get(topic));
        let Some((known, applied)) = known.and_then(|known| Some((known, known.version?))) else { return Ok(None) };
        loop {
            if let Some(compiled) = known.compiled.get() {
                return Ok(compiled.schema().cloned());
            }
            let Ok(compiling) = known.compiling.clone().try_lock_owned() else {
                drop(known.compiling.lock().await);
                continue;
            };
            // Another request may have compiled it in the meantime.
            if let Some(compiled) = known.compiled.get() {
                return Ok(compiled.schema().cloned());
            }
            let (cache, catalogue, topic) = (self.clone(), catalogue.clone(), topic.to_owned());
            let task = async move {
                let compiled = cache.compile_and_cache(&catalogue, &topic, applied.version).await;
                drop(compiling);
                compiled
            };
            return for_all(task).await?;
        }
    }

    /// Compiles the version of a type that is in force, in the turn of the tenant to which the catalogue belongs.
    async fn compile_and_cache(
        &self,
        catalogue: &TenantCatalogue,
        topic: &str,
        version: i32,
    ) -> Result<Option<Arc<Schema>>, CheckError> {
        let owner = &catalogue.tenant;
        let Some(text) = self.read(catalogue, topic, version).await? else { return Ok(None) };
        let compiled = self.parse(owner, topic, text).await?;
        let schema = compiled.ok().map(Arc::new);
        let kept = match &schema {
            Some(schema) => Compiled::reserve(&self.kept_bytes, owner, schema),
            None => Some(Compiled::NotApplicable),
        };
        if let (Some(known), Some(kept)) = (catalogue.types.get().and_then(|types| types.get(topic)), kept) {
            let _ = known.compiled.set(kept);
        }
        Ok(schema)
    }

    /// Compiles a stored version in the turn of a tenant. None if it no longer exists.
    async fn compile(
        &self,
        owner: &Tenant,
        turn: &Tenant,
        topic: &str,
        version: i32,
    ) -> Result<Option<Result<Schema, NotApplied>>, CheckError> {
        let text = store::schema(&mut *self.db.acquire().await?, owner, topic, version).await?;
        let Some(text) = text else { return Ok(None) };
        Ok(Some(self.parse(turn, topic, text).await?))
    }

    /// Reads a schema for all requests.
    async fn read(
        &self,
        catalogue: &TenantCatalogue,
        topic: &str,
        version: i32,
    ) -> sqlx::Result<Option<Box<RawValue>>> {
        let _turn = catalogue.reading.lock().await;
        let _place = self.reads.acquire().await;
        store::schema(&mut *self.db.acquire().await?, &catalogue.tenant, topic, version).await
    }

    async fn parse(
        &self,
        turn: &Tenant,
        topic: &str,
        text: Box<RawValue>,
    ) -> Result<Result<Schema, NotApplied>, NoVerdict> {
        let compiled = self.work.run(turn, move || Schema::parse(&text)).await?;
        Ok(compiled.map_err(|errors| {
            tracing::error!(event_type = topic, ?errors, "a stored schema cannot be applied, so it is not enforced");
            NotApplied
        }))
    }

    fn loaded(&self) -> Loaded {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The catalogues, after a check whether they have changed unless the last one is recent.
    pub(crate) async fn current(&self) -> sqlx::Result<Loaded> {
        let now = BootTime::now();
        let is_recent = |loaded: &Loaded| loaded.checked_at.is_some_and(|at| now < at + VALID_TIME);
        loop {
            let loaded = self.loaded();
            if is_recent(&loaded) {
                return Ok(loaded);
            }
            let Ok(checking) = self.check.clone().try_lock_owned() else {
                drop(self.check.lock().await);
                continue;
            };
            // Another request may have made the check in the meantime.
            let loaded = self.loaded();
            if is_recent(&loaded) {
                return Ok(loaded);
            }
            let cache = self.clone();
            let task = async move {
                let refreshed = cache.refresh(loaded).await;
                drop(checking);
                refreshed
            };
            return for_all(task).await?;
        }
    }

    /// Checks an event against the version that was in force at some time; None: now. It may take a while. Returns None if the
    /// event is accepted.
    pub(crate) async fn refusal(
        &self,
        tenant: &Tenant,
        event: Checked<'_>,
        posted_at: Option<DateTime<Utc>>,
    ) -> Result<Option<Refusal>, CheckError> {
        let loaded = self.current().await?;
        if let Some(refusal) = loaded.size_refusal(tenant, event) {
            return Ok(Some(refusal));
        }
        let Some(catalogue) = loaded.applied(tenant) else { return Ok(None) };
        self.load(&catalogue).await?;
        if let Some(refusal) = catalogue.unknown_type(tenant, event.topic) {
            return Ok(Some(refusal));
        }
        let Some(newest) = catalogue.applied_version(event.topic) else { return Ok(None) };
        let (version, schema) = match posted_at.filter(|at| *at < newest.since) {
            None => (Some(newest.version), self.schema(&catalogue, event.topic).await?),
            Some(posted_at) => {
                let owner = &catalogue.tenant;
                let version = store::version_at(&mut *self.db.acquire().await?, owner, event.topic, posted_at).await?;
                match version {
                    Some(version) => {
                        let compiled = self.compile(owner, tenant, event.topic, version).await?;
                        (Some(version), compiled.and_then(Result::ok).map(Arc::new))
                    }
                    None => (None, None),
                }
            }
        };
        let Some(schema) = schema else { return Ok(None) };
        let payload = event.payload.to_owned();
        let job = move || payload_errors(&schema, &payload, "/payload", &mut Steps::new(CHECK_STEPS));
        let errors = self.work.run(tenant, job).await?.unwrap_or_else(|Exhausted| too_expensive("/payload"));
        Ok((!errors.is_empty()).then_some(Refusal { version, errors }))
    }

    /// Waits for a verdict for as long as a request does.
    pub(crate) async fn within_verdict_time<T>(
        &self,
        checking: impl Future<Output = Result<T, CheckError>>,
    ) -> Result<T, CheckError> {
        tokio::time::timeout(VERDICT_TIME_MAX, checking).await.unwrap_or(Err(NoVerdict::Busy.into()))
    }

    /// Like [`CatalogueCache::refusal`], within the given steps and without waiting. None: that needs more.
    pub(crate) fn refusal_now(
        loaded: &Loaded,
        tenant: &Tenant,
        event: Checked<'_>,
        posted_at: DateTime<Utc>,
        steps: &mut Steps,
    ) -> Option<Option<Refusal>> {
        if let Some(refusal) = loaded.size_refusal(tenant, event) {
            return Some(Some(refusal));
        }
        let Some(catalogue) = loaded.applied(tenant) else { return Some(None) };
        catalogue.types.get()?;
        if let Some(refusal) = catalogue.unknown_type(tenant, event.topic) {
            return Some(Some(refusal));
        }
        let Some(newest) = catalogue.applied_version(event.topic) else { return Some(None) };
        let Some(schema) = catalogue.compiled(event.topic)?.schema() else { return Some(None) };
        // Parsing costs as well.
        steps.spend(event.payload.get().len() as u64 / PARSED_BYTES_PER_STEP).ok()?;
        if newest.since > posted_at || event.payload.get().len() > INLINE_BYTES_MAX {
            return None;
        }
        let errors = payload_errors(schema, event.payload, "/payload", steps).ok()?;
        Some((!errors.is_empty()).then_some(Refusal { version: Some(newest.version), errors }))
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

    fn refresh_in_background(&self) {
        let Ok(guard) = self.check.clone().try_lock_owned() else { return };
        let cache = self.clone();
        tokio::spawn(async move {
            let loaded = cache.loaded();
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
            let tenants = store::catalogues(&mut db).await?.into_iter().map(|Catalogue { tenant, settings, stamp }| {
                let unchanged = loaded.tenants.get(&tenant).filter(|known| known.stamp == stamp).cloned();
                let new = || Arc::new(TenantCatalogue::new(tenant.clone(), stamp, settings));
                (tenant.clone(), unchanged.unwrap_or_else(new))
            });
            let tenants = tenants.collect();
            (loaded.tenants, loaded.stamp) = (Arc::new(tenants), Some(stamp));
            loaded.payload_limits = Arc::new(payload_limits(&mut db).await?.into_iter().collect());
        }
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded.clone();
        Ok(loaded)
    }
}

impl Loaded {
    /// The catalogue of the tenant itself, or else the shared one.
    pub(crate) fn applied(&self, tenant: &Tenant) -> Option<Arc<TenantCatalogue>> {
        let shared = || self.tenants.get(&Tenant::main()).filter(|catalogue| catalogue.settings.is_shared);
        self.tenants.get(tenant).or_else(shared).cloned()
    }

    /// Whether events of a tenant are checked at all.
    pub(crate) fn checks(&self, tenant: &Tenant) -> bool {
        self.payload_limits.contains_key(tenant) || self.applied(tenant).is_some()
    }

    /// Refuses a payload that is larger than those of its tenant may be.
    fn size_refusal(&self, tenant: &Tenant, event: Checked<'_>) -> Option<Refusal> {
        let (max, bytes) = (*self.payload_limits.get(tenant)?, event.payload.get().len());
        let detail = format!("has {bytes} bytes, and the payloads of this tenant may have at most {max}");
        (bytes > max).then(|| Refusal { version: None, errors: vec![FieldError::body("/payload", detail)] })
    }
}

impl TenantCatalogue {
    fn new(tenant: Tenant, stamp: Uuid, settings: CatalogueSettings) -> TenantCatalogue {
        TenantCatalogue { tenant, stamp, settings, types: OnceCell::new(), reading: Mutex::default() }
    }

    async fn load(&self, db: &Database) -> sqlx::Result<()> {
        let load = || async {
            let types = store::known_types(&mut *db.acquire().await?, &self.tenant).await?;
            let known =
                |(name, version)| (name, KnownType { version, compiled: OnceLock::new(), compiling: Arc::default() });
            Ok::<_, sqlx::Error>(types.into_iter().map(known).collect())
        };
        self.types.get_or_try_init(load).await.map(drop)
    }

    fn applied_version(&self, topic: &str) -> Option<AppliedVersion> {
        self.types.get()?.get(topic)?.version
    }

    fn compiled(&self, topic: &str) -> Option<&Compiled> {
        self.types.get()?.get(topic)?.compiled.get()
    }

    /// Refuses an event whose type is unknown, if the catalogue does.
    fn unknown_type(&self, tenant: &Tenant, topic: &str) -> Option<Refusal> {
        let is_known = self.types.get()?.contains_key(topic);
        if is_known || self.settings.unknown_types == UnknownTypes::Accept {
            return None;
        }
        let detail = if self.tenant == *tenant { UNKNOWN_TYPE } else { UNKNOWN_SHARED_TYPE };
        Some(Refusal { version: None, errors: vec![FieldError::body("/event_type", detail)] })
    }

    /// What is wrong with the posts of a tenant, if that can be found out at once. None: it needs other threads.
    fn errors_inline(&self, tenant: &Tenant, posts: &[Post], is_batch: bool) -> Option<Vec<FieldError>> {
        if posts.iter().map(|post| post.payload.get().len()).sum::<usize>() > INLINE_BYTES_MAX {
            return None;
        }
        let (mut errors, mut steps) = (Vec::new(), Steps::new(INLINE_STEPS));
        for (at, post) in posts.iter().enumerate() {
            let pointer = pointer_to(at, is_batch);
            if let Some(refusal) = self.unknown_type(tenant, &post.topic) {
                errors.extend(below(refusal.errors, &pointer));
            } else if self.applied_version(&post.topic).is_some() {
                let Some(schema) = self.compiled(&post.topic)?.schema() else { continue };
                errors.extend(payload_errors(schema, &post.payload, &format!("{pointer}/payload"), &mut steps).ok()?);
            }
        }
        Some(errors)
    }

    /// What is wrong with the posts of a tenant; `schemas`: those that apply to their topics.
    fn errors(
        &self,
        tenant: &Tenant,
        posts: &[Post],
        is_batch: bool,
        schemas: &HashMap<String, Arc<Schema>>,
    ) -> Vec<FieldError> {
        let (mut errors, mut left) = (Vec::new(), REQUEST_STEPS);
        for (at, post) in posts.iter().enumerate() {
            let pointer = pointer_to(at, is_batch);
            if let Some(refusal) = self.unknown_type(tenant, &post.topic) {
                errors.extend(below(refusal.errors, &pointer));
            }
            let Some(schema) = schemas.get(&post.topic) else { continue };
            let (pointer, mut steps) = (format!("{pointer}/payload"), Steps::new(CHECK_STEPS.min(left)));
            let before = steps.left();
            match payload_errors(schema, &post.payload, &pointer, &mut steps) {
                Ok(found) => errors.extend(found),
                Err(Exhausted) => errors.extend(too_expensive(&pointer)),
            }
            left -= before - steps.left();
            if left == 0 {
                break; // the error about this event says it
            }
        }
        errors
    }
}

impl Compiled {
    /// A schema of a tenant that stays compiled. None if there is no room for it.
    fn reserve(budget: &Arc<FairBudget>, owner: &Tenant, schema: &Arc<Schema>) -> Option<Compiled> {
        let bytes = budget.reserve(CallerId::of_tenant(owner), schema.bytes())?;
        Some(Compiled::Kept { schema: schema.clone(), _bytes: bytes })
    }

    fn schema(&self) -> Option<&Arc<Schema>> {
        match self {
            Compiled::Kept { schema, .. } => Some(schema),
            Compiled::NotApplicable => None,
        }
    }
}

/// A stored schema cannot be applied.
struct NotApplied;

/// Runs work that all requests need in a separate task, which goes on if the request that starts it ends. It uses no caller's
/// share of the connections, because requests of others wait for it, so the number of its connections is limited: there is one check
/// at a time, and [`READS_MAX`] others.
async fn for_all<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> sqlx::Result<T> {
    tokio::spawn(work).await.map_err(|_| sqlx::Error::WorkerCrashed)
}

/// What is wrong with a payload; `pointer` is where it is.
pub(crate) fn payload_errors(
    schema: &Schema,
    payload: &RawValue,
    pointer: &str,
    steps: &mut Steps,
) -> Result<Vec<FieldError>, Exhausted> {
    match serde_json::from_str::<Value>(payload.get()) {
        Ok(payload) => schema.errors(&payload, pointer, steps),
        Err(_) => Ok(vec![FieldError::body(pointer, NOT_CHECKABLE)]),
    }
}

pub(crate) fn too_expensive(pointer: &str) -> Vec<FieldError> {
    vec![FieldError::body(pointer, TOO_EXPENSIVE)]
}

fn pointer_to(at: usize, is_batch: bool) -> String {
    if is_batch { format!("/events/{at}") } else { String::new() }
}

fn below(errors: Vec<FieldError>, pointer: &str) -> impl Iterator<Item = FieldError> {
    errors.into_iter().map(move |error| FieldError::body(format!("{pointer}{}", error.pointer), error.detail))
}

#[cfg(test)]
pub(crate) mod tests {
    use pillarbox::database::PoolLimits;
    use serde_json::json;
    use tokio::time::{Instant, sleep};

    fn tenant(name: &str) -> Tenant {
        Tenant::try_from(name.to_owned()).unwrap()
    }

    pub(crate) fn acme() -> Tenant {
        tenant("acme")
    }

    pub(crate) fn rival() -> Tenant {
        tenant("rival")
    }

    /// A type with a compiled schema that has always been in force.
    fn known_type((name, schema): (&str, &str)) -> HashMap<String, KnownType> {
        let schema = Schema::parse(&RawValue::from_string(schema.to_owned()).unwrap()).ok().unwrap();
        let compiled = Compiled::reserve(&FairBudget::new(COMPILED_BYTES), &acme(), &Arc::new(schema)).unwrap();
        let version = Some(AppliedVersion { version: 1, since: DateTime::UNIX_EPOCH });
        [(name.to_owned(), KnownType { version, compiled: OnceLock::from(compiled), compiling: Arc::default() })].into()
    }

    /// A catalogue with a type; None: its types are not loaded.
    pub(crate) fn catalogue(owner: &Tenant, types: Option<(&str, &str)>) -> TenantCatalogue {
        let types = OnceCell::new_with(types.map(known_type));
        TenantCatalogue { types, ..TenantCatalogue::new(owner.clone(), Uuid::nil(), CatalogueSettings::default()) }
    }

    /// A cache that has just loaded these catalogues. Its database cannot be reached.
    pub(crate) fn cache_of<const N: usize>(catalogues: [TenantCatalogue; N]) -> CatalogueCache {
        let acquire_timeout = Duration::from_millis(50);
        let limits = PoolLimits { connections_min: 0, acquire_timeout, ..PoolLimits::default() };
        let pool = pillarbox::database::pool("postgres://none@127.0.0.1:1/none".parse().unwrap(), limits);
        let cache = CatalogueCache::new(&Database::new(pool), SchemaWork::start().unwrap());
        let tenants = catalogues.map(|catalogue| (catalogue.tenant.clone(), Arc::new(catalogue))).into();
        *cache.loaded.write().unwrap() =
            Loaded { checked_at: Some(BootTime::now()), tenants: Arc::new(tenants), ..Loaded::default() };
        cache
    }

    impl CatalogueCache {
        pub(crate) fn database(&self) -> &Database {
            &self.db
        }
    }

    #[tokio::test]
    async fn a_request_waits_a_second_for_its_types_and_its_verdict_together() {
        let cache = cache_of([catalogue(&acme(), None)]);
        let catalogue = cache.loaded().applied(&acme()).unwrap();
        // Another request of the tenant reads, and other work of the tenant occupies its thread.
        let reading = catalogue.reading.lock().await;
        let (is_over, over) = std::sync::mpsc::channel::<()>();
        let work = cache.work().clone();
        let busy = tokio::spawn(async move { work.run(&acme(), move || over.recv()).await });
        let payload = RawValue::from_string(format!("\"{}\"", "x".repeat(INLINE_BYTES_MAX))).unwrap();
        let (owner, posts) = (acme(), vec![Post::new("order.paid", payload)]);
        let checking = cache.check_against(catalogue.clone(), &owner, posts, false);
        let started = Instant::now();
        let loading = async {
            sleep(VERDICT_TIME_MAX * 6 / 10).await;
            catalogue.types.set(known_type(("order.paid", "true"))).ok().unwrap();
            drop(reading);
        };
        let (checked, ()) = tokio::join!(checking, loading);
        assert_eq!(checked.unwrap_err().status(), http::StatusCode::SERVICE_UNAVAILABLE);
        let waited = started.elapsed();
        assert!(waited < VERDICT_TIME_MAX * 14 / 10, "{waited:?}");
        drop(is_over);
        busy.await.unwrap().unwrap().unwrap_err();
    }

    use super::*;

    #[test]
    fn a_tenant_that_fills_the_cache_does_not_exclude_another_one() {
        const OF_TENANT_MAX: usize = 8 * 1024 * 1024;
        let patterns: Vec<Value> = (0..30).map(|n| json!({"pattern": format!(r"^{n}\W{{40}}")})).collect();
        let text = RawValue::from_string(json!({"anyOf": patterns}).to_string()).unwrap();
        let (schema, budget) = (Arc::new(Schema::parse(&text).ok().unwrap()), FairBudget::new(COMPILED_BYTES));
        let fill = |name: &str, max: usize| -> Vec<Compiled> {
            let kept = std::iter::repeat_with(|| Compiled::reserve(&budget, &tenant(name), &schema));
            kept.take(max / schema.bytes()).map_while(std::convert::identity).collect()
        };
        let greedy = fill("greedy", usize::MAX);
        assert!(greedy.len() * schema.bytes() <= COMPILED_BYTES.total / 2);
        let modest = fill("modest", OF_TENANT_MAX);
        assert_eq!(modest.len(), OF_TENANT_MAX / schema.bytes());
        drop(greedy);
        assert!(Compiled::reserve(&budget, &tenant("greedy"), &schema).is_some(), "what is dropped is free again");
    }
}
