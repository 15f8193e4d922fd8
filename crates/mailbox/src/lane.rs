//! The loop under every consumer: one lane of one consumer.
//!
//! A round keeps the leases, runs what is parked and due, the next messages of the log, and a chunk of a replay. What a
//! batch led to is kept in one transaction with the new places: parked, dead, done. A round that fails keeps nothing, and the
//! next one begins with what the database has.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use kit::clock::Clock;
use kit::worker::Round;
use sqlx::PgPool;
use uuid::Uuid;

use crate::cursor::{self, Cursor};
use crate::home;
use crate::lease;
use crate::log::{Place, Reader};
use crate::parked::{self, Key, key_of};
use crate::replay::{self, Replaying};
use crate::replica::Replica;
use crate::retry::Retry;
use crate::settle::Settlement;
use crate::watch::Watcher;
use crate::work::{Item, LaneError, LaneId, Origin, Outcome, Work, Worked};

/// How often a place is written down that moved past nothing of interest.
const QUIET_SAVE_PAUSE: Duration = Duration::from_secs(1);

/// Who is behind takes so many batches at once: what a batch costs besides its messages counts then.
const WHEN_BEHIND: u32 = 10;

#[derive(Debug, Clone, Copy)]
pub struct LaneOptions {
    /// How many messages at a time; some times as many while it is behind.
    pub batch: u32,
    pub retry: Retry,
    /// One lane of all processes has all shards, and reads them in the order of the log; the others stand by.
    pub in_step: bool,
}

impl LaneOptions {
    fn reader(&self, cursor: &Cursor) -> Reader {
        let reader = Reader::new(cursor.filter.clone());
        if self.in_step { reader.in_step() } else { reader }
    }
}

pub struct Lane<W> {
    id: LaneId,
    cursor: Cursor,
    options: LaneOptions,
    replica: Arc<Replica>,
    watcher: Watcher,
    clock: Clock,
    work: W,
    is_registered: bool,
    reader: Reader,
    /// The places that the database has.
    saved: BTreeMap<i16, Place>,
    saved_at: Instant,
    /// Keys that have something parked.
    blocked: HashMap<i16, HashSet<Key>>,
    parked_due: Option<DateTime<Utc>>,
    replays: Vec<Replaying>,
    shared_out_at: Option<Instant>,
    in_round: bool,
    /// Of the watcher, when this lane last read what the database has.
    doubts: u64,
}

impl<W: Work> Lane<W> {
    pub fn new(
        db: PgPool,
        cursor: Cursor,
        options: LaneOptions,
        replica: Arc<Replica>,
        watcher: Watcher,
        clock: Clock,
        work: W,
    ) -> Lane<W> {
        Lane {
            id: LaneId { db, consumer: cursor.consumer.clone(), careful: false, owner: Uuid::now_v7() },
            reader: options.reader(&cursor),
            cursor,
            options,
            replica,
            watcher,
            clock,
            work,
            is_registered: false,
            saved: BTreeMap::new(),
            saved_at: Instant::now(),
            blocked: HashMap::new(),
            parked_due: None,
            replays: Vec::new(),
            shared_out_at: None,
            in_round: false,
            doubts: 0,
        }
    }

    pub async fn round(&mut self) -> Result<Round, LaneError> {
        // Set still: the last round did not come to its end, but to a panic. What it had read is not kept.
        if std::mem::replace(&mut self.in_round, true) {
            self.forget();
            self.id.careful = true;
        }
        if std::mem::replace(&mut self.doubts, self.watcher.doubts()) != self.doubts {
            self.forget();
        }
        let outcome = self.try_round().await;
        self.in_round = false;
        match outcome {
            Ok(round) => Ok(round),
            Err(error) => {
                self.forget();
                self.id.careful = true;
                match error {
                    LaneError::TakenOver => {
                        tracing::info!(consumer = self.id.consumer, "others have taken over; joining again");
                        self.is_registered = false;
                        Ok(Round::Busy)
                    }
                    LaneError::TooMuch => Ok(Round::Busy),
                    error => Err(error),
                }
            }
        }
    }

    /// Writes down how far it has come, and gives up its shards at once.
    pub async fn leave(&mut self) -> Result<(), LaneError> {
        if self.in_round {
            self.forget();
        }
        let kept = match self.saved.is_empty() {
            true => Ok(()),
            false => self.run(Vec::new(), &[]).await,
        };
        self.forget();
        let mut db = self.id.db.acquire().await?;
        lease::leave(&mut db, &self.id.consumer, self.id.owner).await?;
        kept
    }

    async fn try_round(&mut self) -> Result<Round, LaneError> {
        if self.shared_out_at.is_none_or(|at| at.elapsed() > self.replica.pause()) {
            self.share_out().await?;
        }
        let parked = self.run_parked().await?;
        let live = self.run_live().await?;
        let replayed = self.run_replay().await?;
        Ok(if parked || replayed || live { Round::Busy } else { Round::Idle })
    }

    /// Forgets what it knew: it may be wrong.
    fn forget(&mut self) {
        self.reader = self.options.reader(&self.cursor);
        self.saved.clear();
        self.blocked.clear();
        self.replays.clear();
        self.parked_due = None;
        self.shared_out_at = None;
    }

    async fn share_out(&mut self) -> Result<(), LaneError> {
        if !self.is_registered {
            self.register().await?;
        }
        let consumer = &self.id.consumer;
        let mut db = self.id.db.acquire().await?;
        if home::is_restored(&mut db).await? {
            return Err(LaneError::Restored);
        }
        match cursor::is_lapsed(&mut db, consumer).await? {
            Some(false) => {}
            Some(true) => return Err(LaneError::Lapsed(consumer.clone())),
            None => return Err(LaneError::TakenOver), // it was dropped; it registers again
        }
        let Some(held) = lease::share_out(&mut db, consumer, self.id.owner, self.options.in_step).await? else {
            return Err(LaneError::TakenOver);
        };
        let had: BTreeSet<i16> = self.saved.keys().copied().collect();
        for shard in had.difference(&held) {
            self.reader.remove(*shard);
            self.saved.remove(shard);
            self.blocked.remove(shard);
        }
        let new: Vec<i16> = held.difference(&had).copied().collect();
        if !new.is_empty() {
            for (shard, place) in cursor::places(&mut db, consumer, &new).await? {
                self.reader.put(shard, place.clone());
                self.saved.insert(shard, place);
            }
            for (shard, key) in parked::keys(&mut db, consumer, &new).await? {
                self.blocked.entry(shard).or_default().insert(key);
            }
        }
        let held: Vec<i16> = held.into_iter().collect();
        self.parked_due = parked::next_due(&mut db, consumer, &held).await?;
        self.replays = replay::unfinished(&mut db, consumer, &held).await?;
        self.shared_out_at = Some(Instant::now());
        Ok(())
    }

    async fn register(&mut self) -> Result<(), LaneError> {
        if home::is_restored(&mut *self.id.db.acquire().await?).await? {
            return Err(LaneError::Restored);
        }
        self.cursor.register(&self.id.db).await?;
        let mut db = self.id.db.acquire().await?;
        self.replica.beat_on(&mut db).await?;
        // A new name each time: who took over from the old one must not be taken for us. And nothing is left under the old
        // one, which may have joined though the answer was lost: it would hold a share that nobody reads.
        lease::leave(&mut db, &self.id.consumer, self.id.owner).await?;
        self.id.owner = Uuid::now_v7();
        lease::join(&mut db, &self.id.consumer, self.id.owner, self.replica.id()).await?;
        self.is_registered = true;
        Ok(())
    }

    /// Runs what is parked and due; true if there may be more.
    async fn run_parked(&mut self) -> Result<bool, LaneError> {
        let now = self.clock.now();
        if self.parked_due.is_none_or(|due| due > now) {
            return Ok(false);
        }
        let shards: Vec<i16> = self.saved.keys().copied().collect();
        let mut db = self.id.db.acquire().await?;
        let due = parked::due(&mut db, &self.id.consumer, &shards, now, self.options.batch).await?;
        drop(db);
        let item = |parked: parked::Parked| Item {
            run: parked.run,
            is_replayed: false,
            origin: Origin::Parked { place: parked.place, attempts: parked.attempts, discarded: parked.discarded },
            message: parked.message,
        };
        let items: Vec<Item> = due.into_iter().map(item).collect();
        if !items.is_empty() {
            self.run(items, &[]).await?;
        }
        let mut db = self.id.db.acquire().await?;
        self.parked_due = parked::next_due(&mut db, &self.id.consumer, &shards).await?;
        Ok(self.parked_due.is_some_and(|due| due <= self.clock.now()))
    }

    /// Runs a chunk of the oldest replay; true if there is more.
    async fn run_replay(&mut self) -> Result<bool, LaneError> {
        let Some(first) = self.replays.first().map(|replaying| replaying.replay) else { return Ok(false) };
        let (mut chunk, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.replays).into_iter().partition(|replaying| replaying.replay == first);
        let limit = (self.options.batch.min(self.work.most()) / chunk.len() as u32).max(1);
        let mut items = Vec::new();
        let mut db = self.id.db.acquire().await?;
        for replaying in &mut chunk {
            let Some(place) = self.saved.get(&replaying.shard) else { continue };
            let messages = replay::read(&mut db, replaying, &self.cursor.filter, place, limit).await?;
            let run = replaying.run;
            let item = |message| Item { message, run, is_replayed: true, origin: Origin::Log };
            items.extend(messages.into_iter().map(item));
        }
        drop(db);
        self.run(items, &chunk).await?;
        self.replays = chunk.into_iter().filter(|replaying| !replaying.done).chain(rest).collect();
        Ok(!self.replays.is_empty())
    }

    /// Runs the next messages of the log; true if there is more.
    async fn run_live(&mut self) -> Result<bool, LaneError> {
        let Some((now, ahead)) = self.watcher.newest() else { return Ok(false) };
        let batch = self.options.batch.min(self.work.most());
        let followed = ahead.iter().find_map(|ahead| self.reader.follow(ahead, batch));
        // More windows may lie ahead of the one that was followed.
        let has_more = |lane: &Self| !lane.reader.is_done() || !lane.reader.has_reached(&now);
        let messages = match followed {
            Some(messages) => messages,
            None => {
                let was_behind = !self.reader.is_done();
                self.reader.open(&now);
                if self.reader.is_done() {
                    return Ok(false);
                }
                let limit = if was_behind { self.options.batch * WHEN_BEHIND } else { batch };
                let limit = limit.min(self.work.most());
                self.reader.read(&mut *self.id.db.acquire().await?, limit).await?
            }
        };
        if !messages.is_empty() || self.saved_at.elapsed() > QUIET_SAVE_PAUSE {
            let item = |message| Item { message, run: 0, is_replayed: false, origin: Origin::Log };
            self.run(messages.into_iter().map(item).collect(), &[]).await?;
        }
        Ok(has_more(self))
    }

    /// Does what can be done now of these, and keeps what came of it.
    async fn run(&mut self, items: Vec<Item>, replayed: &[Replaying]) -> Result<(), LaneError> {
        let todo: Vec<&Item> = items.iter().filter(|item| self.is_free(item)).collect();
        let worked = match todo.as_slice() {
            [] => Worked { outcomes: Vec::new(), tx: None },
            todo => self.work.run(&self.id, todo).await?,
        };
        if worked.outcomes.len() != todo.len() {
            return Err(LaneError::Work("not every message has an outcome".to_owned()));
        }
        let mut outcomes = worked.outcomes.into_iter();
        let mut settlement = Settlement::new(&self.id.consumer, self.options.retry, self.clock.now());
        for item in &items {
            let outcome = match item.origin {
                Origin::Parked { discarded: true, .. } => Some(Outcome::Done),
                _ if self.is_free(item) => outcomes.next(),
                _ => Some(Outcome::Behind),
            };
            settlement.add(item, outcome.unwrap_or(Outcome::Behind));
        }
        let moved: BTreeMap<i16, Place> = self
            .reader
            .places()
            .iter()
            .filter(|(shard, place)| self.saved.get(shard) != Some(place))
            .map(|(shard, place)| (*shard, place.clone()))
            .collect();

        // The database may have crashed during the work: a place that it no longer knows of would hide what comes now.
        if self.watcher.doubts() != self.doubts {
            return Err(LaneError::Doubtful);
        }
        let mut tx = worked.tx;
        let is_plain = settlement.is_plain() && replayed.is_empty();
        let still_blocked = if is_plain && self.id.advanced(tx.as_mut(), &moved).await? {
            if let Some(tx) = tx {
                tx.commit().await?;
            }
            Vec::new()
        } else {
            self.id.keep(tx, &settlement, replayed, &moved).await?
        };

        self.work.kept();
        self.id.careful = false;
        self.saved.extend(moved);
        self.saved_at = Instant::now();
        for (shard, key, is_blocked) in still_blocked {
            let keys = self.blocked.entry(shard).or_default();
            if is_blocked {
                keys.insert(key);
            } else {
                keys.remove(&key);
            }
        }
        self.parked_due = [self.parked_due, settlement.next_due()].into_iter().flatten().min();
        settlement.count();
        Ok(())
    }

    /// Whether nothing of its key is parked before it, and nobody has discarded it.
    fn is_free(&self, item: &Item) -> bool {
        match item.origin {
            Origin::Parked { discarded, .. } => !discarded,
            Origin::Log => match (key_of(&item.message), self.blocked.get(&item.message.shard)) {
                (Some(key), Some(blocked)) => !blocked.contains(&key),
                (None, _) | (_, None) => true,
            },
        }
    }
}
