//! Lets a request wait until the handlers of this process have processed the message that it has posted.
//!
//! A client that gets the response to a change often continues with another service at once. If the handler of that service
//! runs in this process and owns the shard of the message, the response waits for it, for a bounded time. Otherwise nothing
//! waits, and nothing is asked: another process may own the shard, or the service may have another database.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use serde_json::value::RawValue;
use sqlx::PgConnection;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use crate::log::{Filter, Message, Post, SHARDS, Source};

/// How long a request waits for the handlers. A handler that has kept up needs about 20 ms.
const WAIT_TIME_MAX: Duration = Duration::from_secs(1);

const _: () = assert!(SHARDS as u32 <= u16::BITS, "a bit for each shard");

/// The handlers that run in this process. Clones share one state.
#[derive(Clone, Default)]
pub struct LocalHandlers(Arc<Registry>);

#[derive(Default)]
struct Registry {
    workers: RwLock<Vec<Arc<LocalWorker>>>,
    /// The messages that requests wait for, by message id.
    expected: Mutex<HashMap<Uuid, Arc<Expected>>>,
}

/// A shard worker of a consumer with a handler.
struct LocalWorker {
    filter: Filter,
    /// The shards that it owns, one bit each.
    shards: AtomicU16,
}

struct Expected {
    /// The number of handlers that have yet to process the message.
    remaining: AtomicUsize,
    processed: Notify,
}

/// The connection of a shard worker to the registry.
pub(super) struct LocalWorkerHandle {
    registry: Arc<Registry>,
    worker: Arc<LocalWorker>,
}

/// The messages of one request. Clones belong to the same request.
#[derive(Clone)]
pub struct LocalDelivery(Arc<DeliveryInner>);

struct DeliveryInner {
    registry: Arc<Registry>,
    expected: Mutex<Vec<(Uuid, Arc<Expected>)>>,
}

impl LocalHandlers {
    /// Starts to collect the messages of a request.
    pub fn delivery(&self) -> LocalDelivery {
        LocalDelivery(Arc::new(DeliveryInner { registry: self.0.clone(), expected: Mutex::default() }))
    }

    /// Registers a shard worker. It owns no shards yet.
    pub(super) fn register(&self, filter: Filter) -> LocalWorkerHandle {
        let worker = Arc::new(LocalWorker { filter, shards: AtomicU16::new(0) });
        self.0.workers.write().unwrap_or_else(PoisonError::into_inner).push(worker.clone());
        LocalWorkerHandle { registry: self.0.clone(), worker }
    }
}

impl LocalDelivery {
    /// Expects that the handlers of this process process the message. Must be called in the transaction that has posted it:
    /// after the commit, a handler may already be done. Costs a query only if such a handler reads messages like this one.
    pub async fn expect(
        &self,
        tx: &mut PgConnection,
        source: &Source,
        message_id: Uuid,
        message: &Post,
    ) -> sqlx::Result<()> {
        let interested: Vec<Arc<LocalWorker>> = {
            let workers = self.0.registry.workers.read().unwrap_or_else(PoisonError::into_inner);
            let has_shards = |worker: &&Arc<LocalWorker>| worker.shards.load(Ordering::Acquire) != 0;
            let as_read = as_read(source, message_id, message);
            workers.iter().filter(has_shards).filter(|worker| worker.filter.matches(&as_read)).cloned().collect()
        };
        if interested.is_empty() {
            return Ok(());
        }
        let key = message.key.clone().unwrap_or_else(|| message_id.to_string());
        let shard: i16 = sqlx::query_scalar("select pillarbox.shard_of($1, $2)")
            .bind(message.tenant.as_str())
            .bind(key)
            .fetch_one(tx)
            .await?;
        let owners = interested.iter().filter(|worker| worker.shards.load(Ordering::Acquire) & bit(shard) != 0).count();
        if owners > 0 {
            let expected = Arc::new(Expected { remaining: AtomicUsize::new(owners), processed: Notify::new() });
            lock(&self.0.registry.expected).insert(message_id, expected.clone());
            lock(&self.0.expected).push((message_id, expected));
        }
        Ok(())
    }

    /// Waits until the expected messages are processed, have failed, or [`WAIT_TIME_MAX`] has passed. Call it after the
    /// commit.
    pub async fn wait(&self) {
        let expected: Vec<Arc<Expected>> =
            lock(&self.0.expected).iter().map(|(_, expected)| expected.clone()).collect();
        let deadline = Instant::now() + WAIT_TIME_MAX;
        for expected in expected {
            if timeout_at(deadline, expected.processed.notified()).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for DeliveryInner {
    fn drop(&mut self) {
        let mut expected = lock(&self.registry.expected);
        for (message_id, _) in lock(&self.expected).drain(..) {
            expected.remove(&message_id);
        }
    }
}

impl LocalWorkerHandle {
    /// Publishes which shards the worker owns.
    pub(super) fn set_shards(&self, shards: &[i16]) {
        let bits = shards.iter().fold(0, |bits, shard| bits | bit(*shard));
        self.worker.shards.store(bits, Ordering::Release);
    }

    /// Tells the requests that wait for one of these messages that this worker is done with it, or has parked it. Called
    /// after the commit.
    pub(super) fn processed(&self, message_ids: impl Iterator<Item = Uuid>) {
        let expected = lock(&self.registry.expected);
        if expected.is_empty() {
            return;
        }
        for expected in message_ids.filter_map(|id| expected.get(&id)) {
            if expected.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
                expected.processed.notify_one();
            }
        }
    }
}

impl Drop for LocalWorkerHandle {
    fn drop(&mut self) {
        self.set_shards(&[]);
    }
}

/// The message as a consumer reads it, as far as a filter needs it.
fn as_read(source: &Source, message_id: Uuid, message: &Post) -> Message {
    Message {
        id: 0,
        shard: 0,
        message_id,
        source: source.as_str().to_owned(),
        tenant: message.tenant.as_str().to_owned(),
        topic: message.topic.clone(),
        key: message.key.clone(),
        aggregate_type: message.aggregate_type.clone(),
        aggregate_id: None,
        headers: RawValue::NULL.to_owned(),
        payload: RawValue::NULL.to_owned(),
        at: chrono::DateTime::UNIX_EPOCH,
    }
}

fn bit(shard: i16) -> u16 {
    1_u16.checked_shl(u32::from(shard.unsigned_abs())).unwrap_or(0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for LocalHandlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalHandlers").finish_non_exhaustive()
    }
}
