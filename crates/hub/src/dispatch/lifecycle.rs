//! The life of a dispatcher, from the claim of its shards to their release: joining, loading subscribers, and stopping.

use std::sync::Arc;
use std::time::Duration;

use pillarbox::database::{cluster_identity, step};
use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use super::queues::Updated;
use super::subscriber_queue::SubscriberQueue;
use super::{DispatchError, Dispatcher, store};
use crate::deliveries::recipient::Recipient;
use crate::directory::domain::DirectoryVersion;
use crate::subscribers::recipient::recipient_of;
use crate::subscribers::store::StoredSubscriber;
use crate::{directory, subscribers};

/// How long the dispatcher waits for the attempts in flight when it stops.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(3);

impl Dispatcher {
    /// Claims and releases shards, and loads the subscribers of the owned ones.
    pub(super) async fn rebalance(&mut self) -> Result<(), DispatchError> {
        let (db, time_max) = (self.db.clone(), self.step_time_max);
        if step(&db, "rebalance", time_max, self.claim_shards()).await? {
            self.refresh().await?;
        }
        Ok(())
    }

    /// Returns false if the lease was lost.
    async fn claim_shards(&mut self) -> Result<bool, DispatchError> {
        let mut db = self.db.acquire().await?;
        if cluster_identity::is_restored(&mut db).await? {
            self.reset();
            return Err(DispatchError::Restored);
        }
        let has_lease = self.ownership.claim_shards(&mut db).await?;
        drop(db);
        if !has_lease {
            self.lose_lease();
        }
        Ok(has_lease)
    }

    /// Creates, updates and removes subscriber queues according to the directory, if it has changed.
    pub(super) async fn refresh(&mut self) -> Result<(), DispatchError> {
        let (db, time_max, started_at) = (self.db.clone(), self.step_time_max, Instant::now());
        let refreshed = step(&db, "load subscribers", time_max, self.load_subscribers()).await;
        self.ownership.finish_refresh(started_at);
        refreshed
    }

    async fn load_subscribers(&mut self) -> Result<(), DispatchError> {
        let mut db = self.db.acquire().await?;
        self.ownership.register(&mut db).await?;
        // Read the version before the subscribers: a change in between makes the next refresh load them again.
        let DirectoryVersion { incarnation, count: version } = directory::store::directory_version(&mut db).await?;
        if !self.ownership.is_of(incarnation) {
            drop(db);
            self.rejoin();
            return Ok(());
        }
        if !self.ownership.has_loaded(version) {
            self.load_version(&mut db, version).await?;
        }
        if self.ownership.confirm_version(&mut db, version).await? {
            self.directory.announce_applied();
        }
        Ok(())
    }

    async fn load_version(&mut self, db: &mut PgConnection, version: i64) -> Result<(), DispatchError> {
        self.reader.load_position(db).await?;
        let recipients = self.load_recipients(db).await?;
        let Updated { new, removed } = self.queues.update(recipients);
        for mut queue in removed {
            self.saver.add_left_over(&mut queue);
            self.sender.drop_queue(&queue);
        }
        self.create_queues(db, new).await?;
        self.ownership.set_loaded(version);
        Ok(())
    }

    async fn load_recipients(&self, db: &mut PgConnection) -> Result<Vec<Arc<Recipient>>, DispatchError> {
        let subscribers = subscribers::store::load_shards(db, &self.cipher, &self.ownership.shards())
            .await
            .map_err(|error| DispatchError::Directory(error.to_string()))?;
        let recipient = |stored: StoredSubscriber| match recipient_of(stored.subscriber, stored.secrets) {
            Ok(mut recipient) => {
                recipient.is_enabled &= !stored.is_tenant_suspended;
                Some(Arc::new(recipient))
            }
            Err(error) => {
                tracing::error!(%error, "a subscriber has invalid settings; nothing is sent to it until they are fixed");
                None
            }
        };
        Ok(subscribers.into_iter().filter_map(recipient).collect())
    }

    async fn create_queues(&mut self, db: &mut PgConnection, new: Vec<Arc<Recipient>>) -> sqlx::Result<()> {
        if new.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = new.iter().map(|recipient| recipient.id).collect();
        let mut stored = store::reads::load(db, &ids).await?;
        let now = self.clock.now();
        for recipient in new {
            let stored = stored.remove(&recipient.id).unwrap_or_default();
            let generation = self.ownership.next_generation();
            self.queues.insert(SubscriberQueue::new(recipient, generation, stored, now));
        }
        Ok(())
    }

    /// Drops all in-memory state and the claim on the shards, because the database has another incarnation.
    pub(super) fn rejoin(&mut self) {
        tracing::warn!("the database has failed over or was restarted after a crash; rejoining");
        self.ownership.abandon();
        self.reset();
    }

    /// Drops all in-memory state, because another process owns the shards or an operator has reset the work. The next
    /// rebalance joins again.
    pub(super) fn lose_lease(&mut self) {
        tracing::warn!("lost the lease; its next owner sends the messages in flight again; rejoining");
        self.reset();
    }

    /// Drops all in-memory state. It may be stale; the next round loads it again from the database.
    pub(super) fn reset(&mut self) {
        self.queues.clear();
        self.sender.reset();
        self.ownership.reset();
        self.reader.reset();
        self.saver.reset();
        while self.handed_over.try_recv().is_ok() {}
    }

    /// Stops sending, waits up to [`DRAIN_TIME_MAX`] for the attempts in flight, saves all changes, and releases the shards.
    pub(crate) async fn close(mut self) {
        let deadline = Instant::now() + DRAIN_TIME_MAX;
        let drained = async {
            while self.sender.in_flight() > 0 {
                let Some(attempt) = self.sender.finished().await else { break };
                self.sender.finish_attempt(attempt, &mut self.queues, self.clock.now());
            }
        };
        if tokio::time::timeout_at(deadline, drained).await.is_err() {
            let in_flight = self.sender.in_flight();
            tracing::info!(in_flight, "stopping while webhooks are in flight; they will be sent again");
        }
        let (ownership, now) = (&self.ownership, self.clock.now());
        if let Err(error) = self.saver.save_all(|| ownership.fence(), &mut self.queues, now).await {
            tracing::warn!(%error, "the last outcomes could not be saved; their messages are sent again");
        }
        // An attempt that is still connecting must not send after the next owner has begun.
        self.queues.clear();
        let released = async { self.ownership.release(&mut *self.db.acquire().await?).await };
        if let Err(error) = step(&self.db, "release", self.step_time_max, released).await {
            tracing::warn!(%error, "the shards could not be released; other processes claim them when the lease expires");
        }
    }
}
