//! Waits until a change to a subscriber holds everywhere.
//!
//! Fan-out reads the version of the directory in each of its transactions, so it follows a change at once. A dispatcher has
//! the subscribers of its shards in memory, and loads them again when it learns of a new version. It tells in the table
//! `pillarbox_hub.dispatcher` which version it has applied; a request that has changed a subscriber is answered when all
//! live dispatchers have applied its change. A dispatcher in the process of the request learns of the change in memory, the
//! others with their next poll.

use std::time::Duration;

use mailbox::consumers::has_unknown_workers;
use mailbox::database::Database;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::DISPATCH;
use crate::hub_message::DirectoryVersion;
use crate::store::dispatcher::{self, Applied};

/// The pause between two checks whether other processes have applied a change. It grows from the first to the second value.
const CHECK_PAUSE: Duration = Duration::from_millis(5);
const CHECK_PAUSE_MAX: Duration = Duration::from_millis(200);

/// What the requests and the dispatcher of one process tell each other about the directory.
#[derive(Debug, Clone)]
pub(crate) struct DirectorySync {
    /// The newest version that a request of this process knows.
    newest: watch::Sender<Option<DirectoryVersion>>,
    /// Counts the versions that the dispatcher of this process has applied.
    applied: watch::Sender<u64>,
    /// How long a dispatcher may send without a heartbeat.
    lease_time: Duration,
}

impl DirectorySync {
    pub(crate) fn new(lease_time: Duration) -> DirectorySync {
        DirectorySync { newest: watch::Sender::new(None), applied: watch::Sender::new(0), lease_time }
    }

    /// The versions that requests of this process know, for the dispatcher.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<DirectoryVersion>> {
        self.newest.subscribe()
    }

    /// The dispatcher of this process has applied another version, and has told it in the database.
    pub(crate) fn announce_applied(&self) {
        self.applied.send_modify(|count| *count += 1);
    }

    /// Returns true when every live dispatcher has applied all changes that are committed now, and false if that takes longer
    /// than `time_max` or cannot be found out.
    pub(crate) async fn wait_until_applied(&self, db: &Database, time_max: Duration) -> bool {
        match timeout_at(Instant::now() + time_max, self.wait(db)).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot find out whether dispatchers have applied a change of a subscriber");
                false
            }
            Err(_) => {
                tracing::warn!(?time_max, "a dispatcher has not applied a change of a subscriber in time");
                false
            }
        }
    }

    async fn wait(&self, db: &Database) -> sqlx::Result<()> {
        let (mut applied, mut pause) = (self.applied.subscribe(), CHECK_PAUSE);
        let mut target = None;
        loop {
            let mut connection = db.acquire().await?;
            let Applied { newest, oldest_applied } = dispatcher::applied(&mut connection).await?;
            // Versions of another incarnation of the database do not count: a failover may have lost the change.
            let wanted = *target.get_or_insert(newest);
            let wanted = if wanted.incarnation == newest.incarnation { wanted } else { newest };
            target = Some(wanted);
            // The rows of dispatchers are lost in a failover; one that has not noticed it may still send what it holds.
            if oldest_applied.is_none_or(|oldest| oldest >= wanted.count)
                && !has_unknown_workers(&mut connection, DISPATCH, self.lease_time).await?
            {
                return Ok(());
            }
            drop(connection);
            self.notify_dispatcher(wanted);
            tokio::select! {
                _ = applied.changed() => {}
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(CHECK_PAUSE_MAX),
            }
        }
    }

    fn notify_dispatcher(&self, version: DirectoryVersion) {
        self.newest.send_if_modified(|newest| {
            let is_newer =
                newest.is_none_or(|newest| newest.incarnation != version.incarnation || newest.count < version.count);
            if is_newer {
                *newest = Some(version);
            }
            is_newer
        });
    }
}
