//! Coalesced reads: batches of [`kit::batch`] that only read. Concurrent requests share one query. Requests that arrive
//! while a query runs wait for the next one. So every request is answered by a query that started after it arrived, and
//! a popular event costs one small query at a time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kit::batch::{BatchError, BatchHandler};
use kit::page::ReadyPage;
use mailbox::database::DedicatedConnection;
use sqlx::PgPool;
use uuid::Uuid;

use crate::cache::{Cache, CacheEntry, CacheKey};
use crate::domain::Event;
use crate::store::{event as store, generation};
use crate::view::EventView;

const EVENT_TTL: Duration = Duration::from_secs(300);

/// The result of reading one event.
#[derive(Debug, Clone)]
pub(crate) enum FoundEvent {
    /// Visible to its owner alone; never cached.
    Hidden(Box<Event>),
    /// Visible to everyone: version, participant count and the serialized response.
    Public { version: i64, active_participants: i32, body: Bytes },
}

/// Reads single events by id.
pub(crate) struct EventReader {
    pub(crate) db: PgPool,
    pub(crate) cache: Cache,
}

impl BatchHandler for EventReader {
    type Item = Uuid;
    type Output = Option<FoundEvent>;
    type Error = sqlx::Error;

    const COALESCES: bool = true;

    async fn run(&self, items: &[Uuid]) -> Result<Vec<Option<FoundEvent>>, BatchError<sqlx::Error>> {
        let found = self.read(items).await.map_err(BatchError::Whole)?;
        Ok(items.iter().map(|id| found.get(id).cloned()).collect())
    }
}

impl EventReader {
    async fn read(&self, items: &[Uuid]) -> sqlx::Result<HashMap<Uuid, FoundEvent>> {
        let ids: Vec<Uuid> = items.iter().copied().collect::<HashSet<_>>().into_iter().collect();
        let outlines = store::outlines(&mut *self.db.acquire().await?, &ids).await?;
        let (hidden, public): (Vec<_>, Vec<_>) = outlines.into_iter().partition(|outline| !outline.is_public);
        let keys: Vec<CacheKey> =
            public.iter().map(|event| cache_key(event.id, event.version, event.active_participants)).collect();
        let entries = self.cache.get_all(&keys).await;
        let (mut found, mut missing) = (HashMap::new(), hidden.iter().map(|event| event.id).collect::<Vec<_>>());
        for (outline, entry) in public.into_iter().zip(entries) {
            let (version, active_participants) = (outline.version, outline.active_participants);
            match entry {
                Some(entry) => {
                    let body = entry.body.clone();
                    found.insert(outline.id, FoundEvent::Public { version, active_participants, body });
                }
                None => missing.push(outline.id),
            }
        }
        if missing.is_empty() {
            return Ok(found);
        }
        // The connection returns to the pool before the events are serialized.
        let events = store::find_all(&mut *self.db.acquire().await?, &missing).await?;
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
    /// has changed meanwhile is never found.
    fn serialize(&self, event: Event) -> (FoundEvent, Option<(CacheKey, Arc<CacheEntry>)>) {
        if !event.is_public() {
            return (FoundEvent::Hidden(Box::new(event)), None);
        }
        let (version, active_participants) = (event.version, event.active_participants);
        let key = cache_key(event.id, version, active_participants);
        let body = Bytes::from(EventView::from(event).to_json());
        let entry = self.cache.entry(key.tag.clone(), ReadyPage { body: body.clone(), next_cursor: None });
        (FoundEvent::Public { version, active_participants, body }, Some((key, Arc::new(entry))))
    }
}

fn cache_key(id: Uuid, version: i64, active_participants: i32) -> CacheKey {
    CacheKey { key: format!("event:{id}"), tag: format!("{version}.{active_participants}"), ttl: EVENT_TTL }
}

/// Reads the generations of the feeds and of the cities.
pub(crate) struct GenerationReader(DedicatedConnection);

impl GenerationReader {
    pub(crate) fn new(db: PgPool) -> GenerationReader {
        GenerationReader(DedicatedConnection::for_reading(db))
    }

    async fn read(&self) -> sqlx::Result<(i64, i64)> {
        let mut connection = self.0.acquire().await?;
        let found = generation::current(connection.connection()).await;
        connection.release(&found).await;
        found
    }
}

impl BatchHandler for GenerationReader {
    type Item = ();
    type Output = (i64, i64);
    type Error = sqlx::Error;

    const COALESCES: bool = true;

    async fn run(&self, items: &[()]) -> Result<Vec<(i64, i64)>, BatchError<sqlx::Error>> {
        let found = match self.read().await {
            Ok(found) => found,
            // The connection may have been closed while idle; the retry opens another one.
            Err(_) => self.read().await.map_err(BatchError::Whole)?,
        };
        Ok(vec![found; items.len()])
    }
}
