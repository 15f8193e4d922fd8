//! Ownership: which shards this process owns, and which version of the directory it has applied.

use std::collections::BTreeSet;
use std::time::Duration;

use pillarbox::consumers::{Fence, Lease, ShardAssignment};
use pillarbox::database::Incarnation;
use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use super::DispatchError;
#[cfg(test)]
use super::send_permit::fixtures::permanent_lease;
use crate::directory;
use crate::directory::domain::DirectoryVersion;

/// Refreshes of the subscribers take at most a fifth of the time, however often subscribers change: each one is followed by a
/// pause of this factor times its duration, at most [`REFRESH_PAUSE_MAX`].
const REFRESH_PAUSE_FACTOR: u32 = 4;
const REFRESH_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Pauses of up to this length in all are skipped: requests wait for a refresh, and subscribers usually change seldom.
const REFRESH_BURST: Duration = Duration::from_millis(300);

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

    /// Reports a database error, so that no process follows a snapshot from before it.
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

    pub(super) fn finish_refresh(&mut self, started_at: Instant) {
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

    /// Drops the claim on the shards, because the database has another incarnation.
    pub(super) fn abandon(&mut self) {
        self.assignment.abandon();
    }

    /// Claims and releases shards. Returns false if the lease was lost.
    pub(super) async fn claim_shards(&mut self, db: &mut PgConnection) -> sqlx::Result<bool> {
        let Some(shards) = self.assignment.rebalance(db).await? else { return Ok(false) };
        self.incarnation = self.assignment.incarnation();
        self.set_shards(shards);
        self.lease = Some(self.assignment.lease().clone());
        self.rebalanced_at = Some(Instant::now());
        Ok(true)
    }

    pub(super) fn shards(&self) -> Vec<i16> {
        self.shards.iter().copied().collect()
    }

    /// Registers this dispatcher before it loads its first version, so that a change that is committed later waits for it.
    pub(super) async fn register(&mut self, db: &mut PgConnection) -> sqlx::Result<()> {
        let owner = self.assignment.owner();
        if self.registered != Some(owner) {
            directory::store::dispatchers::register(db, owner).await?;
            (self.registered, self.confirmed_version) = (Some(owner), None);
        }
        Ok(())
    }

    /// Whether the subscriber queues are those of this version of the directory.
    pub(super) fn has_loaded(&self, version: i64) -> bool {
        self.loaded_version == Some(version)
    }

    pub(super) fn set_loaded(&mut self, version: i64) {
        (self.loaded_version, self.newest_version) = (Some(version), version);
    }

    /// Saves that this version is applied: from now on no request is sent with older settings. Returns false if the database
    /// knows it already.
    pub(super) async fn confirm_version(&mut self, db: &mut PgConnection, version: i64) -> sqlx::Result<bool> {
        if self.confirmed_version == Some(version) {
            return Ok(false);
        }
        directory::store::dispatchers::set_applied(db, self.assignment.owner(), version).await?;
        self.confirmed_version = Some(version);
        Ok(true)
    }

    /// Releases the shards, so that other processes need not wait until the lease expires.
    pub(super) async fn release(&mut self, db: &mut PgConnection) -> sqlx::Result<()> {
        directory::store::dispatchers::remove(db, self.assignment.owner()).await?;
        self.assignment.release(db).await
    }

    /// The generation of a new queue.
    pub(super) fn next_generation(&mut self) -> u64 {
        self.generations += 1;
        self.generations
    }
}

#[cfg(test)]
impl Ownership {
    /// Sets the state after a successful rebalance and refresh.
    pub(super) fn assume_loaded(&mut self, shards: BTreeSet<i16>, version: DirectoryVersion) {
        let DirectoryVersion { incarnation, count: version } = version;
        (self.shards, self.incarnation, self.lease) = (shards, incarnation, Some(permanent_lease()));
        (self.loaded_version, self.newest_version) = (Some(version), version);
        self.confirmed_version = Some(version);
        self.rebalanced_at = Some(Instant::now());
    }

    pub(super) fn assume_lease(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }
}
