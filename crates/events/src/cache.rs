//! Copies of what was read and made ready: in memory, and in Redis if there is one, where all processes share them.
//!
//! A copy carries a tag of what it was made from: an event's version, a generation of the feeds. Who wants it names the tag
//! that is right now, asked of the database after the request came. So it does not matter who fills a copy late, or forgets
//! to delete one: a wrong tag is a miss. Redis may be slow, away or empty; then there are more misses.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kit::clock::Clock;
use kit::page::ReadyPage;
use metrics::Counter;
use moka::future::Cache as Memory;
use redis::AsyncCommands;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use tokio::sync::OnceCell;

/// What is in memory, at most.
const MEMORY_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// What a string and its neighbours cost besides their bytes.
const COPY_BYTES: usize = 200;
/// Longer than any copy is good.
const KEPT_MAX: Duration = Duration::from_secs(3_600);

/// Asking Redis must not take longer than asking the database.
const REDIS_TIME_MAX: Duration = Duration::from_millis(50);
/// Nobody waits for these.
const REDIS_WRITE_TIME_MAX: Duration = Duration::from_secs(1);
/// After a failure it is left alone for so long.
const REDIS_REST: Duration = Duration::from_secs(1);

/// Something made ready, and what it was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) tag: String,
    /// In milliseconds since 1970: it ages from here, wherever it is kept.
    made_at: i64,
    pub(crate) next_cursor: Option<String>,
    pub(crate) body: Bytes,
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) key: String,
    pub(crate) tag: String,
    pub(crate) ttl: Duration,
}

#[derive(Clone)]
pub(crate) struct Cache {
    clock: Clock,
    memory: Memory<String, Arc<Copy>>,
    shared: Option<Arc<Shared>>,
    hits: Counter,
    misses: Counter,
}

struct Shared {
    client: redis::Client,
    prefix: String,
    connection: OnceCell<ConnectionManager>,
    rests_until: Mutex<Option<Instant>>,
    failures: Counter,
}

impl Cache {
    /// `redis`: a client, and what its keys begin with.
    pub(crate) fn new(clock: Clock, redis: Option<(redis::Client, String)>) -> Cache {
        let weight = |key: &String, copy: &Arc<Copy>| {
            u32::try_from(key.len() + copy.body.len() + COPY_BYTES).unwrap_or(u32::MAX)
        };
        let memory = Memory::builder().max_capacity(MEMORY_BYTES_MAX).weigher(weight).time_to_live(KEPT_MAX).build();
        // Made once: to find a counter by its name costs more than to count.
        let counter = |outcome: &'static str| metrics::counter!("pillarbox_events_cache_total", "outcome" => outcome);
        let shared = redis.map(|(client, prefix)| {
            let (connection, rests_until, failures) = (OnceCell::new(), Mutex::default(), counter("away"));
            Arc::new(Shared { client, prefix, connection, rests_until, failures })
        });
        Cache { clock, memory, shared, hits: counter("hit"), misses: counter("miss") }
    }

    pub(crate) fn copy(&self, tag: String, page: ReadyPage) -> Copy {
        Copy { tag, made_at: self.clock.now().timestamp_millis(), next_cursor: page.next_cursor, body: page.body }
    }

    /// Good copies of these, as far as there are any.
    pub(crate) async fn get_all(&self, wanted: &[Wanted]) -> Vec<Option<Arc<Copy>>> {
        let mut found = Vec::with_capacity(wanted.len());
        for one in wanted {
            found.push(self.memory.get(&one.in_memory()).await.filter(|copy| self.is_good(copy, one)));
        }
        let missing: Vec<usize> = (0..wanted.len()).filter(|at| found[*at].is_none()).collect();
        let keys: Vec<&str> = missing.iter().map(|at| wanted[*at].key.as_str()).collect();
        for (at, copy) in missing.into_iter().zip(self.get_shared(&keys).await) {
            found[at] = copy.map(Arc::new).filter(|copy| self.is_good(copy, &wanted[at]));
            if let Some(copy) = &found[at] {
                self.memory.insert(wanted[at].in_memory(), copy.clone()).await;
            }
        }
        let hits = found.iter().flatten().count();
        self.hits.increment(hits as u64);
        self.misses.increment((found.len() - hits) as u64);
        found
    }

    pub(crate) async fn put_all(&self, made: Vec<(Wanted, Arc<Copy>)>) {
        for (wanted, copy) in &made {
            self.memory.insert(wanted.in_memory(), copy.clone()).await;
        }
        self.share(made);
    }

    /// A good copy. When there is none it is made once, however many ask for it at the same time.
    pub(crate) async fn get_or_make<F: Future<Output = Result<Copy, E>> + Send, E: Send + Sync + 'static>(
        &self,
        wanted: &Wanted,
        make: impl FnOnce() -> F + Send,
    ) -> Result<Arc<Copy>, Arc<E>> {
        let key = wanted.in_memory();
        match self.memory.get(&key).await {
            Some(copy) if self.is_good(&copy, wanted) => {
                self.hits.increment(1);
                return Ok(copy);
            }
            Some(_) => self.memory.invalidate(&key).await,
            None => {}
        }
        let filling = async {
            if let Some(copy) = self.get_all(std::slice::from_ref(wanted)).await.pop().flatten() {
                return Ok(copy);
            }
            let copy = Arc::new(make().await?);
            self.share(vec![(wanted.clone(), copy.clone())]);
            Ok(copy)
        };
        // Boxed: every request would have to bring the room for it otherwise, which costs more than to find a copy.
        Box::pin(self.memory.try_get_with(key, filling)).await
    }

    fn is_good(&self, copy: &Copy, wanted: &Wanted) -> bool {
        let age = self.clock.now().timestamp_millis() - copy.made_at;
        copy.tag == wanted.tag && u128::try_from(age.max(0)).is_ok_and(|age| age < wanted.ttl.as_millis())
    }

    async fn get_shared(&self, keys: &[&str]) -> Vec<Option<Copy>> {
        let none = || keys.iter().map(|_| None).collect();
        let Some(shared) = self.shared.as_ref().filter(|_| !keys.is_empty()) else { return none() };
        let prefixed: Vec<String> = keys.iter().map(|key| format!("{}{key}", shared.prefix)).collect();
        let asked =
            shared.ask(REDIS_TIME_MAX, async |mut redis| redis.mget::<_, Vec<Option<Vec<u8>>>>(&prefixed).await).await;
        match asked {
            Some(found) if found.len() == keys.len() => {
                found.into_iter().map(|bytes| bytes.and_then(Copy::decode)).collect()
            }
            Some(_) | None => none(),
        }
    }

    /// Nobody waits until Redis has them.
    fn share(&self, made: Vec<(Wanted, Arc<Copy>)>) {
        if let Some(shared) = self.shared.clone().filter(|_| !made.is_empty()) {
            tokio::spawn(async move { shared.put_all(&made).await });
        }
    }
}

impl Shared {
    async fn put_all(&self, made: &[(Wanted, Arc<Copy>)]) {
        let mut pipe = redis::pipe();
        for (wanted, copy) in made {
            let (key, seconds) = (format!("{}{}", self.prefix, wanted.key), wanted.ttl.as_secs().max(1));
            pipe.set_ex(key, copy.encode(), seconds).ignore();
        }
        self.ask(REDIS_WRITE_TIME_MAX, async |mut redis| pipe.query_async::<()>(&mut redis).await).await;
    }

    /// None when it does not answer in time; then nobody asks for a while.
    async fn ask<T>(
        &self,
        time_max: Duration,
        question: impl AsyncFnOnce(ConnectionManager) -> redis::RedisResult<T>,
    ) -> Option<T> {
        let now = Instant::now();
        if self.rests_until.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|until| until > now) {
            return None;
        }
        let asking = async {
            let config =
                ConnectionManagerConfig::new().set_number_of_retries(0).set_connection_timeout(Some(REDIS_TIME_MAX));
            let connect = || self.client.get_connection_manager_with_config(config);
            question(self.connection.get_or_try_init(connect).await?.clone()).await
        };
        let error = match tokio::time::timeout(time_max, asking).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} ms", time_max.as_millis()),
        };
        self.failures.increment(1);
        tracing::debug!(error, "Redis is left alone for a while; reads go to the database");
        *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + REDIS_REST);
        None
    }
}

impl Wanted {
    /// With the tag: a copy of another is another copy.
    fn in_memory(&self) -> String {
        format!("{} {}", self.tag, self.key)
    }
}

impl Copy {
    /// Three lines, and the body.
    fn encode(&self) -> Vec<u8> {
        let cursor = self.next_cursor.as_deref().unwrap_or_default();
        let mut bytes = format!("{}\n{}\n{cursor}\n", self.tag, self.made_at).into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// None for what this version did not write.
    fn decode(bytes: Vec<u8>) -> Option<Copy> {
        let bytes = Bytes::from(bytes);
        let mut lines = bytes.splitn(4, |byte| *byte == b'\n');
        let mut line = || std::str::from_utf8(lines.next()?).ok().map(str::to_owned);
        let (tag, made_at, cursor) = (line()?, line()?.parse().ok()?, line()?);
        let body = bytes.slice_ref(lines.next()?);
        Some(Copy { tag, made_at, next_cursor: Some(cursor).filter(|cursor| !cursor.is_empty()), body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_comes_back_as_it_went() {
        for next_cursor in [None, Some("abc".to_owned())] {
            let copy = Copy { tag: "7.3".to_owned(), made_at: 12, next_cursor, body: Bytes::from_static(b"{\n\n}") };
            assert_eq!(Copy::decode(copy.encode()), Some(copy));
        }
        for foreign in ["", "a\nb", "a\nb\nc\nd", "1\n2\n3"] {
            assert_eq!(Copy::decode(foreign.as_bytes().to_vec()), None, "{foreign}");
        }
    }
}
