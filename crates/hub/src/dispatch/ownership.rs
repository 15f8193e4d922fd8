//! Ownership: which subscribers this process sends to, from the claim of their shard to its release.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use mailbox::consumers::{Fence, Lease, ShardAssignment};
use mailbox::database::{Incarnation, step};
use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use super::saver::save_changes;
use super::subscriber_queue::SubscriberQueue;
use super::{DispatchError, Dispatcher};
use crate::delivery::Recipient;
use crate::hub_message::DirectoryVersion;
use crate::store::subscriber::StoredSubscriber;
use crate::store::{self, delivery_reads};

/// Refreshes of the subscribers take at most a fifth of the time, however often subscribers change: each one is followed by a
/// pause of this factor times its duration, at most [`REFRESH_PAUSE_MAX`].
const REFRESH_PAUSE_FACTOR: u32 = 4;
const REFRESH_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Pauses of up to this length in all are skipped: requests wait for a refresh, and subscribers usually change seldom.
const REFRESH_BURST: Duration = Duration::from_millis(300);
/// How long the dispatcher waits for the attempts in flight when it stops.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(3);

pub(super) struct Ownership {
    assignment: ShardAssignment,
    /// The incarnation of the database that the shards were claimed in. None: they have to be claimed.
    incarnation: Option<Incarnation>,
    shards: BTreeSet<i16>,
    /// The lease of the shards.
    lease: Option<Lease>,
    /// The version of the directory (all subscribers with their settings; each change increments the version) that the
    /// subscriber queues were loaded from, in the same incarnation. None: they have to be loaded.
    loaded_version: Option<i64>,
    /// The newest version of the directory that a poll or fan-out has reported, in the same incarnation.
    newest_version: i64,
    /// The owner id under which this dispatcher is registered, so that requests wait for it. None: it is not.
    registered: Option<Uuid>,
    /// The version that the database has as applied by this dispatcher; at most `loaded_version`. None: unknown.
    confirmed_version: Option<i64>,
    rebalanced_at: Option<Instant>,
    /// When the pauses after all refreshes so far end.
    refresh_pause_until: Option<Instant>,
    /// How many subscriber queues this dispatcher has created. A new queue gets the count as its generation, which
    /// distinguishes it from earlier queues of the same subscriber.
    generations: u64,
}

impl Ownership {
    pub(super) fn new(assignment: ShardAssignment) -> Ownership {
        Ownership {
            assignment,
            incarnation: None,
            shards: BTreeSet::new(),
            lease: None,
            loaded_version: None,
            newest_version: 0,
            registered: None,
            confirmed_version: None,
            rebalanced_at: None,
            refresh_pause_until: None,
            generations: 0,
        }
    }

    pub(super) fn fence(&self) -> Fence {
        self.assignment.fence()
    }

    /// The lease of the shards, unless it may have expired: then another process may send the same messages.
    pub(super) fn valid_lease(&self) -> Option<Lease> {
        self.lease.clone().filter(Lease::is_valid)
    }

    /// Whether the subscriber queues are those of the owned shards. Until then nothing is sent.
    pub(super) fn is_loaded(&self) -> bool {
        self.loaded_version.is_some()
    }

    /// Whether in-memory state has become stale since the last call, because the database restarted or failed over.
    pub(super) fn consume_invalidation(&mut self) -> bool {
        self.assignment.consume_invalidation()
    }

    /// Whether something that was read or handed over belongs to the incarnation of the database that the shards were
    /// claimed in. In another one, its numbers and versions are those of other messages and subscribers.
    pub(super) fn is_of(&self, incarnation: Option<Incarnation>) -> bool {
        incarnation.is_some() && incarnation == self.incarnation
    }

    /// Reports a database error, so that nobody follows a snapshot from before it.
    pub(super) fn report_error(&self, error: &DispatchError) {
        if let DispatchError::Database(error) = error {
            self.assignment.report_error(error);
        }
    }

    pub(super) fn is_rebalance_due(&self) -> bool {
        self.rebalanced_at.is_none_or(|at| at.elapsed() > self.assignment.rebalance_interval())
    }

    /// Sets the owned shards. If they changed, nothing is sent until the subscriber queues are loaded again: some of them may
    /// belong to another process now.
    pub(super) fn set_shards(&mut self, shards: BTreeSet<i16>) {
        if shards != self.shards {
            self.loaded_version = None;
            self.shards = shards;
        }
    }

    /// Notices a version of the directory, which must be of the incarnation that the shards were claimed in.
    pub(super) fn notice_version(&mut self, version: DirectoryVersion) {
        self.newest_version = self.newest_version.max(version.count);
    }

    /// When the subscribers have to be loaded again; None if they have not changed, and the database knows that this version
    /// is applied.
    pub(super) fn refresh_due(&self) -> Option<Instant> {
        let is_behind = |version: Option<i64>| version.is_none_or(|version| self.newest_version > version);
        let is_due = is_behind(self.loaded_version) || is_behind(self.confirmed_version);
        (self.rebalanced_at.is_some() && is_due).then(|| {
            let now = Instant::now();
            self.refresh_pause_until.and_then(|until| until.checked_sub(REFRESH_BURST)).map_or(now, |at| at.max(now))
        })
    }

    fn finish_refresh(&mut self, started_at: Instant) {
        let now = Instant::now();
        let pause = ((now - started_at) * REFRESH_PAUSE_FACTOR).min(REFRESH_PAUSE_MAX);
        self.refresh_pause_until = Some(self.refresh_pause_until.map_or(now, |until| until.max(now)) + pause);
    }

    pub(super) fn reset(&mut self) {
        self.shards.clear();
        self.lease = None;
        (self.loaded_version, self.newest_version, self.rebalanced_at) = (None, 0, None);
        (self.registered, self.confirmed_version) = (None, None);
        self.incarnation = None;
    }

    fn next_generation(&mut self) -> u64 {
        self.generations += 1;
        self.generations
    }
}

impl Dispatcher {
    /// Claims and releases shards, and loads the subscribers of the owned ones.
    pub(super) async fn rebalance(&mut self) -> Result<(), DispatchError> {
        let (db, time_max) = (self.db.clone(), self.step_time_max);
        step(&db, "rebalance", time_max, self.claim_shards()).await?;
        // Not loaded, if the lease was lost.
        match self.ownership.rebalanced_at {
            Some(_) => self.refresh().await,
            None => Ok(()),
        }
    }

    async fn claim_shards(&mut self) -> Result<(), DispatchError> {
        let mut db = self.db.acquire().await?;
        if mailbox::database::cluster_identity::is_restored(&mut db).await? {
            self.reset();
            return Err(DispatchError::Restored);
        }
        let Some(shards) = self.ownership.assignment.rebalance(&mut db).await? else {
            drop(db);
            self.lose_lease();
            return Ok(());
        };
        drop(db);
        self.ownership.incarnation = self.ownership.assignment.incarnation();
        self.ownership.set_shards(shards);
        self.ownership.lease = Some(self.ownership.assignment.lease().clone());
        self.ownership.rebalanced_at = Some(Instant::now());
        Ok(())
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
        self.register(&mut db).await?;
        // Read the version before the subscribers: a change in between makes the next refresh load them again.
        let DirectoryVersion { incarnation, count: version } = store::subscriber::directory_version(&mut db).await?;
        if !self.ownership.is_of(incarnation) {
            drop(db);
            self.rejoin();
            return Ok(());
        }
        if self.ownership.loaded_version != Some(version) {
            self.load_version(&mut db, version).await?;
        }
        Ok(self.confirm_version(&mut db, version).await?)
    }

    async fn load_version(&mut self, db: &mut PgConnection, version: i64) -> Result<(), DispatchError> {
        if !self.reader.announced.is_known() {
            // Read before the positions of new queues, so that everything after it is announced to them.
            self.reader.announced.load(delivery_reads::newest_number(db).await?);
        }
        let recipients = self.load_recipients(db).await?;
        let new = self.update_queues(recipients);
        self.create_queues(db, new).await?;
        (self.ownership.loaded_version, self.ownership.newest_version) = (Some(version), version);
        Ok(())
    }

    /// Registers this dispatcher before it loads its first version, so that a change that is committed later waits for it.
    async fn register(&mut self, db: &mut PgConnection) -> sqlx::Result<()> {
        let owner = self.ownership.assignment.owner();
        if self.ownership.registered != Some(owner) {
            store::dispatcher::register(db, owner).await?;
            (self.ownership.registered, self.ownership.confirmed_version) = (Some(owner), None);
        }
        Ok(())
    }

    /// Tells the requests that wait for this version that it is applied. From now on no request is sent with older settings.
    async fn confirm_version(&mut self, db: &mut PgConnection, version: i64) -> sqlx::Result<()> {
        if self.ownership.confirmed_version != Some(version) {
            store::dispatcher::set_applied(db, self.ownership.assignment.owner(), version).await?;
            self.ownership.confirmed_version = Some(version);
            self.directory.announce_applied();
        }
        Ok(())
    }

    /// A request of this process has changed a subscriber.
    pub(super) fn notice_directory(&mut self) {
        let version = *self.directory_changes.borrow_and_update();
        if let Some(version) = version.filter(|version| self.ownership.is_of(version.incarnation)) {
            self.ownership.notice_version(version);
        }
    }

    async fn load_recipients(&self, db: &mut PgConnection) -> Result<Vec<Arc<Recipient>>, DispatchError> {
        let shards: Vec<i16> = self.ownership.shards.iter().copied().collect();
        let subscribers = store::subscriber::load_shards(db, &self.cipher, &shards)
            .await
            .map_err(|error| DispatchError::Directory(error.to_string()))?;
        let recipient = |stored: StoredSubscriber| match Recipient::new(stored.subscriber, stored.secrets) {
            Ok(mut recipient) => {
                recipient.is_enabled &= !stored.is_tenant_suspended;
                Some(Arc::new(recipient))
            }
            Err(error) => {
                tracing::error!(error, "a subscriber has invalid settings; nothing is sent to it until they are fixed");
                None
            }
        };
        Ok(subscribers.into_iter().filter_map(recipient).collect())
    }

    /// Updates the existing queues, removes those without a recipient, and returns the recipients without a queue.
    fn update_queues(&mut self, recipients: Vec<Arc<Recipient>>) -> Vec<Arc<Recipient>> {
        let mut removed: HashSet<Uuid> = self.queues.keys().copied().collect();
        let mut new = Vec::new();
        for recipient in recipients {
            removed.remove(&recipient.id);
            match self.queues.get_mut(&recipient.id) {
                Some(queue) => {
                    self.scheduler.activate(recipient.id);
                    queue.update_recipient(recipient);
                }
                None => new.push(recipient),
            }
        }
        for subscriber in removed {
            if let Some(mut queue) = self.queues.remove(&subscriber) {
                queue.drain_health(&mut self.saver.left_over);
                self.sender.drop_queue(&queue);
            }
        }
        new
    }

    async fn create_queues(&mut self, db: &mut PgConnection, new: Vec<Arc<Recipient>>) -> sqlx::Result<()> {
        if new.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = new.iter().map(|recipient| recipient.id).collect();
        let mut stored = delivery_reads::load(db, &ids).await?;
        let now = self.clock.now();
        for recipient in new {
            let id = recipient.id;
            let (generation, stored) = (self.ownership.next_generation(), stored.remove(&id).unwrap_or_default());
            self.queues.insert(id, SubscriberQueue::new(recipient, generation, stored, now));
            self.scheduler.activate(id);
        }
        Ok(())
    }

    /// Drops all in-memory state and the claim on the shards, because the database has another incarnation.
    pub(super) fn rejoin(&mut self) {
        tracing::warn!("the database has failed over or was restarted after a crash; rejoining");
        self.ownership.assignment.abandon();
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
        self.scheduler.reset();
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
                let Some(attempt) = self.sender.results.recv().await else { break };
                self.finish_attempt(attempt);
            }
        };
        if tokio::time::timeout_at(deadline, drained).await.is_err() {
            let in_flight = self.sender.in_flight();
            tracing::info!(in_flight, "stopping while webhooks are in flight; they will be sent again");
        }
        if let Err(error) = self.save_all().await {
            tracing::warn!(%error, "the last outcomes could not be saved; their messages are sent again");
        }
        // An attempt that is still connecting must not send after the next owner has begun.
        self.queues.clear();
        let released = async {
            let mut db = self.db.acquire().await?;
            store::dispatcher::remove(&mut db, self.ownership.assignment.owner()).await?;
            self.ownership.assignment.release(&mut db).await
        };
        if let Err(error) = step(&self.db, "release", self.step_time_max, released).await {
            tracing::warn!(%error, "the shards could not be released; other processes claim them when the lease expires");
        }
    }

    /// Saves everything that is not saved yet: first the changes of a failed or interrupted save, then those of the queues.
    async fn save_all(&mut self) -> sqlx::Result<()> {
        if let Some((changes, save)) = self.saver.in_flight.take()
            && !matches!(save.await, Ok(Ok(true)))
        {
            self.saver.failed = Some(changes);
        }
        let (now, fence) = (self.clock.now(), self.ownership.fence());
        if let Some(changes) = self.saver.failed.take()
            && !save_changes(&self.db, self.step_time_max, fence, &changes, now).await?
        {
            return Ok(()); // The lease is lost: the new owner sends these messages again.
        }
        let mut changes = std::mem::take(&mut self.saver.left_over);
        for queue in self.queues.values_mut() {
            queue.drain_changes(now, &mut changes);
            queue.drain_health(&mut changes);
        }
        save_changes(&self.db, self.step_time_max, self.ownership.fence(), &changes, now).await.map(drop)
    }
}

#[cfg(test)]
impl Ownership {
    /// Sets the state after a successful rebalance and refresh.
    pub(super) fn assume_loaded(&mut self, shards: BTreeSet<i16>, version: DirectoryVersion) {
        let DirectoryVersion { incarnation, count: version } = version;
        (self.shards, self.incarnation, self.lease) = (shards, incarnation, Some(Lease::permanent()));
        (self.loaded_version, self.newest_version) = (Some(version), version);
        self.confirmed_version = Some(version);
        self.rebalanced_at = Some(Instant::now());
    }
}
