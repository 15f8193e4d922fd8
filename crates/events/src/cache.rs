//! A cache of serialized responses: in memory, and in Redis if configured, where all processes share it.
//!
//! An entry carries a tag of the data that it was made from: an event's version and the time of its change, or a
//! generation of the feeds. No tag is used twice, not even after a failover to a standby that lacks the change. A reader
//! looks up the tag that is valid now, which it reads from the database after its request arrived. So an entry that is
//! stored late or never deleted does no harm: a different tag is a miss. If Redis is slow, unreachable or empty, there
//! are more misses.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_kit::page::ReadyPage;
use metrics::Counter;
use moka::future::Cache as MemoryCache;
use redis::AsyncCommands;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use runtime::clock::Clock;
use tokio::sync::OnceCell;

/// Maximum total size of the entries in memory, in bytes.
const MEMORY_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Estimated overhead of an entry in memory, in bytes.
const ENTRY_OVERHEAD_BYTES: usize = 200;
/// Maximum time that an entry stays in memory; longer than any TTL.
const MEMORY_TTL_MAX: Duration = Duration::from_secs(3_600);

/// Timeout of a Redis read: a read from the database must not be slower than one from the cache.
const REDIS_READ_TIMEOUT: Duration = Duration::from_millis(50);
/// Timeout of a Redis write. No request waits for a write.
const REDIS_WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time without Redis commands after a failed one.
const REDIS_BACKOFF: Duration = Duration::from_secs(1);

/// A serialized response and the tag of the data that it was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheEntry {
    pub(crate) tag: String,
    /// Milliseconds since 1970. The TTL counts from here, wherever the entry is stored.
    made_at: i64,
    pub(crate) next_cursor: Option<String>,
    pub(crate) body: Bytes,
}

/// A lookup: the key, the tag that is valid now, and the maximum age.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheKey {
    pub(crate) key: String,
    pub(crate) tag: String,
    pub(crate) ttl: Duration,
}

#[derive(Clone)]
pub(crate) struct Cache {
    clock: Clock,
    memory: MemoryCache<String, Arc<CacheEntry>>,
    redis: Option<Arc<RedisCache>>,
    hits: Counter,
    misses: Counter,
}

struct RedisCache {
    client: redis::Client,
    prefix: String,
    connection: OnceCell<ConnectionManager>,
    backoff_until: Mutex<Option<Instant>>,
    failures: Counter,
}

impl Cache {
    /// `redis`: a client and the prefix of its keys.
    pub(crate) fn new(clock: Clock, redis: Option<(redis::Client, String)>) -> Cache {
        let weight = |key: &String, entry: &Arc<CacheEntry>| {
            u32::try_from(key.len() + entry.body.len() + ENTRY_OVERHEAD_BYTES).unwrap_or(u32::MAX)
        };
        let memory =
            MemoryCache::builder().max_capacity(MEMORY_BYTES_MAX).weigher(weight).time_to_live(MEMORY_TTL_MAX).build();
        // The counters are created once: looking one up by name costs more than incrementing it.
        let counter = |outcome: &'static str| metrics::counter!("pillarbox_events_cache_total", "outcome" => outcome);
        let redis = redis.map(|(client, prefix)| {
            let (connection, backoff_until, failures) = (OnceCell::new(), Mutex::default(), counter("away"));
            Arc::new(RedisCache { client, prefix, connection, backoff_until, failures })
        });
        Cache { clock, memory, redis, hits: counter("hit"), misses: counter("miss") }
    }

    /// A new entry, made now.
    pub(crate) fn entry(&self, tag: String, page: ReadyPage) -> CacheEntry {
        CacheEntry { tag, made_at: self.clock.now().timestamp_millis(), next_cursor: page.next_cursor, body: page.body }
    }

    /// Drops all entries in memory.
    pub(crate) fn clear(&self) {
        self.memory.invalidate_all();
    }

    /// The valid entries of these keys, in order; None for a miss.
    pub(crate) async fn get_all(&self, keys: &[CacheKey]) -> Vec<Option<Arc<CacheEntry>>> {
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            found.push(self.memory.get(&key.in_memory()).await.filter(|entry| self.is_valid(entry, key)));
        }
        let missing: Vec<usize> = (0..keys.len()).filter(|at| found[*at].is_none()).collect();
        let redis_keys: Vec<&str> = missing.iter().map(|at| keys[*at].key.as_str()).collect();
        for (at, entry) in missing.into_iter().zip(self.get_from_redis(&redis_keys).await) {
            found[at] = entry.map(Arc::new).filter(|entry| self.is_valid(entry, &keys[at]));
            if let Some(entry) = &found[at] {
                self.memory.insert(keys[at].in_memory(), entry.clone()).await;
            }
        }
        let hits = found.iter().flatten().count();
        self.hits.increment(hits as u64);
        self.misses.increment((found.len() - hits) as u64);
        found
    }

    pub(crate) async fn put_all(&self, entries: Vec<(CacheKey, Arc<CacheEntry>)>) {
        for (key, entry) in &entries {
            self.memory.insert(key.in_memory(), entry.clone()).await;
        }
        self.spawn_redis_write(entries);
    }

    /// The valid entry in memory.
    pub(crate) async fn get(&self, key: &CacheKey) -> Option<Arc<CacheEntry>> {
        let memory_key = key.in_memory();
        let entry = self.memory.get(&memory_key).await?;
        if self.is_valid(&entry, key) {
            self.hits.increment(1);
            return Some(entry);
        }
        self.memory.invalidate(&memory_key).await;
        None
    }

    /// The entry after a miss in memory: from Redis, or made. That runs once, however many requests wait for the same key.
    pub(crate) async fn make_once<F: Future<Output = Result<CacheEntry, E>> + Send, E: Send + Sync + 'static>(
        &self,
        key: &CacheKey,
        make: impl FnOnce() -> F + Send,
    ) -> Result<Arc<CacheEntry>, Arc<E>> {
        let fill = async {
            if let Some(entry) = self.get_all(std::slice::from_ref(key)).await.pop().flatten() {
                return Ok(entry);
            }
            let entry = Arc::new(make().await?);
            self.spawn_redis_write(vec![(key.clone(), entry.clone())]);
            Ok(entry)
        };
        // Boxed: otherwise the future of every request would include the space for the fill, which costs more than a
        // hit.
        Box::pin(self.memory.try_get_with(key.in_memory(), fill)).await
    }

    fn is_valid(&self, entry: &CacheEntry, key: &CacheKey) -> bool {
        let age = self.clock.now().timestamp_millis() - entry.made_at;
        entry.tag == key.tag && u128::try_from(age.max(0)).is_ok_and(|age| age < key.ttl.as_millis())
    }

    async fn get_from_redis(&self, keys: &[&str]) -> Vec<Option<CacheEntry>> {
        let none = || keys.iter().map(|_| None).collect();
        let Some(redis) = self.redis.as_ref().filter(|_| !keys.is_empty()) else { return none() };
        let prefixed: Vec<String> = keys.iter().map(|key| format!("{}{key}", redis.prefix)).collect();
        let read =
            async |mut connection: ConnectionManager| connection.mget::<_, Vec<Option<Vec<u8>>>>(&prefixed).await;
        match redis.run(REDIS_READ_TIMEOUT, read).await {
            Some(found) if found.len() == keys.len() => {
                found.into_iter().map(|bytes| bytes.and_then(CacheEntry::decode)).collect()
            }
            Some(_) | None => none(),
        }
    }

    /// Writes the entries to Redis in the background.
    fn spawn_redis_write(&self, entries: Vec<(CacheKey, Arc<CacheEntry>)>) {
        if let Some(redis) = self.redis.clone().filter(|_| !entries.is_empty()) {
            tokio::spawn(async move { redis.put_all(&entries).await });
        }
    }
}

impl RedisCache {
    async fn put_all(&self, entries: &[(CacheKey, Arc<CacheEntry>)]) {
        let mut pipe = redis::pipe();
        for (key, entry) in entries {
            let (name, seconds) = (format!("{}{}", self.prefix, key.key), key.ttl.as_secs().max(1));
            pipe.set_ex(name, entry.encode(), seconds).ignore();
        }
        self.run(REDIS_WRITE_TIMEOUT, async |mut redis| pipe.query_async::<()>(&mut redis).await).await;
    }

    /// Runs a command. Returns None if it fails or times out, and without running it during the backoff after a
    /// failure.
    async fn run<T>(
        &self,
        timeout: Duration,
        command: impl AsyncFnOnce(ConnectionManager) -> redis::RedisResult<T>,
    ) -> Option<T> {
        let now = Instant::now();
        if self.backoff_until.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|until| until > now) {
            return None;
        }
        let running = async {
            let config = ConnectionManagerConfig::new()
                .set_number_of_retries(0)
                .set_connection_timeout(Some(REDIS_READ_TIMEOUT));
            let connect = || self.client.get_connection_manager_with_config(config);
            command(self.connection.get_or_try_init(connect).await?.clone()).await
        };
        let error = match tokio::time::timeout(timeout, running).await {
            Ok(Ok(result)) => return Some(result),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no response within {} ms", timeout.as_millis()),
        };
        self.failures.increment(1);
        tracing::debug!(error, "a Redis command failed; reads go to the database during the backoff");
        *self.backoff_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + REDIS_BACKOFF);
        None
    }
}

impl CacheKey {
    /// The key in memory. It includes the tag, so that entries with different tags do not replace each other.
    fn in_memory(&self) -> String {
        format!("{} {}", self.tag, self.key)
    }
}

impl CacheEntry {
    pub(crate) fn page(&self) -> ReadyPage {
        ReadyPage { body: self.body.clone(), next_cursor: self.next_cursor.clone() }
    }

    /// Three lines (tag, time, cursor), followed by the body.
    fn encode(&self) -> Vec<u8> {
        let cursor = self.next_cursor.as_deref().unwrap_or_default();
        let mut bytes = format!("{}\n{}\n{cursor}\n", self.tag, self.made_at).into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// Returns None if the bytes do not have the format of [`CacheEntry::encode`].
    fn decode(bytes: Vec<u8>) -> Option<CacheEntry> {
        let bytes = Bytes::from(bytes);
        let mut lines = bytes.splitn(4, |byte| *byte == b'\n');
        let mut line = || std::str::from_utf8(lines.next()?).ok().map(str::to_owned);
        let (tag, made_at, cursor) = (line()?, line()?.parse().ok()?, line()?);
        let body = bytes.slice_ref(lines.next()?);
        Some(CacheEntry { tag, made_at, next_cursor: Some(cursor).filter(|cursor| !cursor.is_empty()), body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_entry_decodes_to_the_same_entry() {
        for next_cursor in [None, Some("abc".to_owned())] {
            let body = Bytes::from_static(b"{\n\n}");
            let entry = CacheEntry { tag: "7.3".to_owned(), made_at: 12, next_cursor, body };
            assert_eq!(CacheEntry::decode(entry.encode()), Some(entry));
        }
        for foreign in ["", "a\nb", "a\nb\nc\nd", "1\n2\n3"] {
            assert_eq!(CacheEntry::decode(foreign.as_bytes().to_vec()), None, "{foreign}");
        }
    }
}
