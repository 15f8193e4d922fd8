//! Coalesced reads: batches of [`runtime::batch`] that only read. Concurrent requests share one query. Requests that arrive
//! while a query runs wait for the next one. So every request is answered by a query that started after it arrived, and
//! a popular event costs one small query at a time.
//!
//! A batch belongs to many callers, so it uses the share of none: it has a dedicated connection, on which one batch runs at a
//! time. A caller that occupies the pool delays no batch.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::HeaderValue;
use http_kit::etag;
use http_kit::page::ReadyPage;
use pillarbox::database::{Database, DedicatedConnection};
use runtime::batch::{BatchError, BatchHandler};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cache::{Cache, CacheEntry, CacheKey};
use crate::domain::Event;
use crate::store::event::{self as store, Outline};
use crate::store::generation::{self, Generations};
use crate::view::EventView;

const EVENT_TTL: Duration = Duration::from_secs(300);

/// The result of reading one event.
#[derive(Debug, Clone)]
pub(crate) enum FoundEvent {
    /// Visible to its owner alone; never cached.
    Hidden(Box<Event>),
    /// Visible to everyone: the version that the serialized response shows, and the response.
    Public { version: ShownVersion, body: Bytes },
}

/// The state of an event from which a representation was made. A version is assigned again after a failover that has lost it, but
/// not at the same microsecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShownVersion {
    pub(crate) version: i64,
    pub(crate) updated_at: DateTime<Utc>,
    pub(crate) active_participants: i32,
}

impl ShownVersion {
    pub(crate) fn of(event: &Event) -> ShownVersion {
        let Event { version, updated_at, active_participants, .. } = event;
        ShownVersion { version: *version, updated_at: *updated_at, active_participants: *active_participants }
    }

    pub(crate) fn etag(&self) -> HeaderValue {
        etag::with_extra(self.version, self.updated_at, self.active_participants)
    }

    fn cache_key(&self, id: Uuid) -> CacheKey {
        let tag = format!("{}.{}.{}", self.version, self.updated_at.timestamp_micros(), self.active_participants);
        CacheKey { key: format!("event:{id}"), tag, ttl: EVENT_TTL }
    }
}

impl From<&Outline> for ShownVersion {
    fn from(outline: &Outline) -> ShownVersion {
        let Outline { version, updated_at, active_participants, .. } = *outline;
        ShownVersion { version, updated_at, active_participants }
    }
}

/// Reads single events by id.
pub(crate) struct EventReader {
    connection: DedicatedConnection,
    cache: Cache,
}

impl BatchHandler for EventReader {
    type Item = Uuid;
    type Output = Option<FoundEvent>;
    type Error = sqlx::Error;

    const COALESCES: bool = true;

    async fn run(&self, items: &[Uuid]) -> Result<Vec<Option<FoundEvent>>, BatchError<sqlx::Error>> {
        let found = match self.read(items).await {
            Ok(found) => found,
            // As for `GenerationReader`.
            Err(_) => self.read(items).await.map_err(BatchError::Whole)?,
        };
        Ok(items.iter().map(|id| found.get(id).cloned()).collect())
    }
}

impl EventReader {
    pub(crate) fn new(db: &Database, cache: Cache) -> EventReader {
        EventReader { connection: db.dedicated_connection(), cache }
    }

    async fn read(&self, items: &[Uuid]) -> sqlx::Result<HashMap<Uuid, FoundEvent>> {
        let mut connection = self.connection.acquire().await?;
        let found = self.read_on(connection.connection(), items).await;
        connection.release(&found).await;
        found
    }

    async fn read_on(&self, db: &mut PgConnection, items: &[Uuid]) -> sqlx::Result<HashMap<Uuid, FoundEvent>> {
        let ids: Vec<Uuid> = items.iter().copied().collect::<HashSet<_>>().into_iter().collect();
        let outlines = store::outlines(db, &ids).await?;
        let (hidden, public): (Vec<_>, Vec<_>) = outlines.into_iter().partition(|outline| !outline.is_public());
        let keys: Vec<CacheKey> = public.iter().map(|event| ShownVersion::from(event).cache_key(event.id)).collect();
        let entries = self.cache.get_all(&keys).await;
        let (mut found, mut missing) = (HashMap::new(), hidden.iter().map(|event| event.id).collect::<Vec<_>>());
        for (outline, entry) in public.into_iter().zip(entries) {
            match entry {
                Some(entry) => {
                    let (version, body) = (ShownVersion::from(&outline), entry.body.clone());
                    found.insert(outline.id, FoundEvent::Public { version, body });
                }
                None => missing.push(outline.id),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let events = store::find_all(db, &missing).await?;
        let mut entries = Vec::new();
        for event in events {
            let id = event.id;
            let (serialized, entry) = self.serialize(event);
            found.insert(id, serialized);
            entries.extend(entry);
        }
        self.cache.put_all(entries).await;
        Ok(found)
    }

    /// Returns the event and its cache entry. The tag comes from the same row as the body, so an entry of an event that
    /// has changed since is never found.
    fn serialize(&self, event: Event) -> (FoundEvent, Option<(CacheKey, Arc<CacheEntry>)>) {
        if !event.is_public() {
            return (FoundEvent::Hidden(Box::new(event)), None);
        }
        let version = ShownVersion::of(&event);
        let key = version.cache_key(event.id);
        let body = Bytes::from(EventView::from(event).to_json());
        let entry = self.cache.entry(key.tag.clone(), ReadyPage { body: body.clone(), next_cursor: None });
        (FoundEvent::Public { version, body }, Some((key, Arc::new(entry))))
    }
}

/// Reads the generations of the feeds and of the cities.
pub(crate) struct GenerationReader(DedicatedConnection);

impl GenerationReader {
    pub(crate) fn new(db: &Database) -> GenerationReader {
        GenerationReader(db.dedicated_connection())
    }

    async fn read(&self) -> sqlx::Result<Generations> {
        let mut connection = self.0.acquire().await?;
        let found = generation::current(connection.connection()).await;
        connection.release(&found).await;
        found
    }
}

impl BatchHandler for GenerationReader {
    type Item = ();
    type Output = Generations;
    type Error = sqlx::Error;

    const COALESCES: bool = true;

    async fn run(&self, items: &[()]) -> Result<Vec<Generations>, BatchError<sqlx::Error>> {
        let found = match self.read().await {
            Ok(found) => found,
            // The connection may have been closed while idle; the retry opens another one.
            Err(_) => self.read().await.map_err(BatchError::Whole)?,
        };
        Ok(vec![found; items.len()])
    }
}
