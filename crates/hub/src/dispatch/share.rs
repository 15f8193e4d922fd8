//! Whose turn it is: which subscribers are this process's, from when it takes them until it gives them up.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::feed::{Feed, Save};
use super::{DispatchError, Dispatcher, REFRESH_PAUSE, Recipient, UNKNOWN};
use crate::store;

/// How long the last answers are waited for at the end.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(3);

impl Dispatcher {
    /// First what is being kept is kept, and nothing new is begun: who is given a shard must find it.
    pub(super) fn is_time_to_look(&self) -> bool {
        self.looked_at.is_none_or(|at| at.elapsed() > self.share.pause())
    }

    /// Takes its part of the shards, and of what is in them.
    pub(super) async fn look(&mut self) -> Result<(), DispatchError> {
        let mut db = self.db.acquire().await?;
        if mailbox::home::is_restored(&mut db).await? {
            self.forget();
            return Err(DispatchError::Restored);
        }
        let Some(held) = self.share.look(&mut db).await? else {
            drop(db);
            self.forget();
            return Ok(());
        };
        drop(db);
        self.hold(held);
        self.looked_at = Some(tokio::time::Instant::now());
        self.refresh().await
    }

    /// From now on these shards are its own. What it knows of others it must not send, even if it cannot read yet which
    /// subscribers they have.
    pub(super) fn hold(&mut self, shards: BTreeSet<i16>) {
        if shards != self.shards {
            self.version = 0;
            self.shards = shards;
        }
    }

    /// Everything that it knew may be wrong.
    pub(super) fn forget(&mut self) {
        self.feeds.clear();
        self.hot.clear();
        self.timers.clear();
        (self.in_flight, self.version, self.newest_version, self.told_to) = (0, 0, 0, UNKNOWN);
        self.shards.clear();
        if let Some((_, saving)) = &self.saving {
            saving.abort();
        }
        while self.handed_over.try_recv().is_ok() {}
        (self.reading, self.asking, self.saving, self.unsaved) = (None, None, None, None);
        self.looked_at = None;
    }

    /// When the directory is to be read, if it has changed.
    pub(super) fn refresh_due(&self) -> Option<tokio::time::Instant> {
        let has_changed = self.looked_at.is_some() && (self.version == 0 || self.newest_version > self.version);
        has_changed.then(|| self.refreshed_at.map_or_else(tokio::time::Instant::now, |at| at + REFRESH_PAUSE))
    }

    /// Brings the feeds in line with the directory.
    pub(super) async fn refresh(&mut self) -> Result<(), DispatchError> {
        self.refreshed_at = Some(tokio::time::Instant::now());
        let mut db = self.db.acquire().await?;
        let version = store::subscriber::version(&mut db).await?;
        if version == self.version {
            return Ok(());
        }
        let shards: Vec<i16> = self.shards.iter().copied().collect();
        if self.told_to == UNKNOWN {
            self.told_to = store::dispatch::newest(&mut db).await?;
        }
        let known = store::subscriber::of_shards(&mut db, &self.seal, &shards)
            .await
            .map_err(|error| DispatchError::Directory(error.to_string()))?;
        let mut gone: HashSet<Uuid> = self.feeds.keys().copied().collect();
        let mut new = Vec::new();
        for known in known {
            let recipient = match Recipient::of(known) {
                Ok(recipient) => Arc::new(recipient),
                Err(error) => {
                    tracing::error!(error, "a subscriber cannot be sent to");
                    continue;
                }
            };
            gone.remove(&recipient.id);
            match self.feeds.get_mut(&recipient.id) {
                Some(feed) => {
                    feed.change(recipient.clone());
                    self.hot.insert(recipient.id);
                }
                None => new.push(recipient),
            }
        }
        for subscriber in gone {
            if let Some(feed) = self.feeds.remove(&subscriber) {
                self.in_flight -= feed.in_flight();
            }
        }
        let ids: Vec<Uuid> = new.iter().map(|recipient| recipient.id).collect();
        let mut loaded = store::dispatch::load(&mut db, &ids).await?;
        let now = self.clock.now();
        for recipient in new {
            let id = recipient.id;
            let loaded = loaded.remove(&id).unwrap_or_default();
            self.generation += 1;
            let mut feed = Feed::new(recipient, loaded.position, loaded.lanes, loaded.done, now);
            feed.generation = self.generation;
            self.feeds.insert(id, feed);
            self.hot.insert(id);
        }
        (self.version, self.newest_version) = (version, version);
        Ok(())
    }

    /// Stops sending, waits a little for what is under way, keeps it, and lets others go on.
    pub(crate) async fn close(mut self) {
        let deadline = tokio::time::Instant::now() + DRAIN_TIME_MAX;
        let drained = async {
            while self.in_flight > 0 {
                let Some(finished) = self.finished.1.recv().await else { break };
                self.settle(finished);
            }
        };
        if tokio::time::timeout_at(deadline, drained).await.is_err() {
            tracing::info!(in_flight = self.in_flight, "some webhooks are still under way; they will be sent again");
        }
        if let Some((save, saving)) = self.saving.take()
            && !matches!(saving.await, Ok(Ok(true)))
        {
            self.unsaved = Some(save);
        }
        let now = self.clock.now();
        let fence = self.share.fence();
        let earlier = match self.unsaved.take() {
            Some(save) => store::dispatch::keep(&self.db, fence, &save, now).await,
            None => Ok(true),
        };
        let mut save = Save::default();
        self.feeds.values_mut().for_each(|feed| feed.save(now, &mut save));
        let kept = match earlier {
            Ok(true) => store::dispatch::keep(&self.db, fence, &save, now).await,
            other => other,
        };
        if let Err(error) = kept {
            tracing::warn!(%error, "the last outcomes are not kept; what they tell of is sent again");
        }
        let left = async { self.share.leave(&mut *self.db.acquire().await?).await };
        if let Err(error) = left.await {
            tracing::warn!(%error, "shards are not given up; others take them when the lease ends");
        }
    }
}
