//! Sending: from the messages of a subscriber to its endpoint, and back to what came of it.
//!
//! Subscribers are shared out among processes by shard; one process at a time sends to a subscriber, so its lanes, limits
//! and breaker are in one place. A [`feed::Feed`] knows all of one subscriber and decides; the loop here reads for
//! feeds, sends what they say, and keeps what came of it, many at a time. No transaction is open while anything is sent.

pub(crate) mod deliver;
pub(crate) mod feed;
mod keeping;
mod mail;
mod reading;
mod share;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use kit::clock::Clock;
use kit::secret::Seal;
use kit::worker::Round;
use mailbox::lease::Share;
use mailbox::watch::Watcher;
use sqlx::PgPool;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use uuid::Uuid;

use self::feed::{Came, Feed, Key, Save};
use self::keeping::SAVE_LINGER;
pub(crate) use self::mail::{Event, Mail, Recipient, Snapshot};
use crate::client::Client;
use crate::domain::{Reason, Verdict};
use crate::fanout::Fanned;
use crate::store::dispatch::{News, Read, Wishes};

/// After the database was away.
const AGAIN_PAUSE: Duration = Duration::from_millis(200);
/// The directory is read no more often, however often it changes.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);
/// Over all subscribers of this process.
const IN_FLIGHT_MAX: usize = 4_096;
/// The number of no message, and not 0: that is what there is to tell before the first.
const UNKNOWN: i64 = -1;

/// What came of a message that was sent.
struct Finished {
    /// Of the feed: one that was forgotten, or went to another process and came back, is another.
    generation: u64,
    subscriber: Uuid,
    /// Of the subscriber, as it was sent to.
    version: i64,
    key: Key,
    came: Came,
}

pub(crate) struct Dispatcher {
    db: PgPool,
    clock: Clock,
    client: Client,
    seal: Seal,
    share: Share,
    watcher: Watcher,
    /// Of the watcher: the database may have taken back what was known before.
    doubts: u64,
    looked_at: Option<tokio::time::Instant>,
    shards: BTreeSet<i16>,
    /// Of the directory, as the feeds know it, and the newest that was heard of.
    version: i64,
    newest_version: i64,
    refreshed_at: Option<tokio::time::Instant>,
    feeds: HashMap<Uuid, Feed>,
    /// Feeds that may have something to do.
    hot: HashSet<Uuid>,
    /// Whose turn it is to be read for first.
    turn: usize,
    /// When to look at a feed again that waits for something.
    timers: BTreeSet<(DateTime<Utc>, Uuid)>,
    /// How many feeds there have been.
    generation: u64,
    in_flight: usize,
    /// All messages up to here were told to the feeds.
    told_to: i64,
    told_at: tokio::time::Instant,
    asked_at: tokio::time::Instant,
    handed_over: mpsc::Receiver<Fanned>,
    finished: (mpsc::UnboundedSender<Finished>, mpsc::UnboundedReceiver<Finished>),
    reading: Option<(Wishes, JoinHandle<sqlx::Result<Read>>)>,
    asking: Option<JoinHandle<sqlx::Result<News>>>,
    saving: Option<(Arc<Save>, JoinHandle<sqlx::Result<bool>>)>,
    /// What could not be kept yet: nothing more is sent until it is.
    unsaved: Option<Arc<Save>>,
    again_at: Option<tokio::time::Instant>,
    saved_at: tokio::time::Instant,
}

impl Dispatcher {
    pub(crate) fn new(
        db: PgPool,
        clock: Clock,
        client: Client,
        seal: Seal,
        share: Share,
        watcher: Watcher,
        handed_over: mpsc::Receiver<Fanned>,
    ) -> Dispatcher {
        Dispatcher {
            db,
            clock,
            client,
            seal,
            share,
            doubts: watcher.doubts(),
            watcher,
            looked_at: None,
            shards: BTreeSet::new(),
            version: 0,
            newest_version: 0,
            refreshed_at: None,
            feeds: HashMap::new(),
            hot: HashSet::new(),
            turn: 0,
            timers: BTreeSet::new(),
            generation: 0,
            in_flight: 0,
            told_to: UNKNOWN,
            told_at: tokio::time::Instant::now(),
            asked_at: tokio::time::Instant::now(),
            handed_over,
            finished: mpsc::unbounded_channel(),
            reading: None,
            asking: None,
            saving: None,
            unsaved: None,
            again_at: None,
            saved_at: tokio::time::Instant::now(),
        }
    }

    /// Waits until something happens, and does what follows from it.
    pub(crate) async fn round(&mut self) -> Result<Round, DispatchError> {
        // Neither messages nor outcomes wait for the disk: after a crash the same numbers can be other messages.
        if std::mem::replace(&mut self.doubts, self.watcher.doubts()) != self.doubts {
            self.forget();
        }
        if self.is_time_to_look() && self.saving.is_none() && self.unsaved.is_none() {
            self.flush().await?;
            self.look().await?;
        } else if self.refresh_due().is_some_and(|due| due <= tokio::time::Instant::now()) {
            self.refresh().await?;
        }
        self.wait().await?;
        // Until it knows whose messages are its own, it sends none.
        if self.version != 0 {
            self.go_on();
        }
        Ok(Round::Busy)
    }

    // ---- what happens

    async fn wait(&mut self) -> Result<(), DispatchError> {
        let until = self.next_wake();
        tokio::select! {
            Some(finished) = self.finished.1.recv() => self.settle(finished),
            Some(fanned) = self.handed_over.recv() => self.hear(fanned),
            read = ended(self.reading.as_mut().map(|(_, reading)| reading)) => self.take_in(read)?,
            news = ended(self.asking.as_mut()) => {
                self.asking = None;
                self.learn(news??);
            }
            saved = ended(self.saving.as_mut().map(|(_, saving)| saving)) => self.saved(saved)?,
            () = tokio::time::sleep_until(until) => {}
        }
        // Whatever else has happened meanwhile.
        while let Ok(finished) = self.finished.1.try_recv() {
            self.settle(finished);
        }
        while let Ok(fanned) = self.handed_over.try_recv() {
            self.hear(fanned);
        }
        Ok(())
    }

    fn next_wake(&self) -> tokio::time::Instant {
        let now = tokio::time::Instant::now();
        let mut until = (self.told_at.max(self.asked_at) + self.news_pause()).max(now + Duration::from_millis(1));
        if let Some((at, _)) = self.timers.first() {
            let pause = (*at - self.clock.now()).to_std().unwrap_or_default();
            until = until.min(now + pause);
        }
        if self.saving.is_none() && self.has_news() {
            until = until.min(self.saved_at + SAVE_LINGER);
        }
        if let Some(due) = self.refresh_due() {
            until = until.min(due);
        }
        until.max(now)
    }

    fn settle(&mut self, finished: Finished) {
        let feed = self.feeds.get_mut(&finished.subscriber);
        let Some(feed) = feed.filter(|feed| feed.generation == finished.generation) else { return };
        self.in_flight -= 1;
        let mut came = finished.came;
        if came.verdict == Verdict::Gone && finished.version != feed.recipient.version {
            // Its owner has changed it meanwhile, perhaps its address: that one may be there.
            came.verdict = Verdict::Retry;
        }
        feed.finished(&finished.key, came, self.clock.now(), rand::random());
        self.hot.insert(finished.subscriber);
    }

    // ---- what follows

    fn go_on(&mut self) {
        let now = self.clock.now();
        while let Some((at, subscriber)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            self.hot.insert(subscriber);
        }
        let waits = self.again_at.is_some_and(|at| at > tokio::time::Instant::now());
        if self.unsaved.is_none() {
            self.send(now);
        }
        if !waits {
            self.save(now);
            self.read(now);
            self.ask();
        }
        self.cool(now);
    }

    fn send(&mut self, now: DateTime<Utc>) {
        for subscriber in &self.hot {
            let Some(feed) = self.feeds.get_mut(subscriber) else { continue };
            // One may have as many under way as are left for all others: however many take all they can, some are left.
            while feed.in_flight() < IN_FLIGHT_MAX.saturating_sub(self.in_flight)
                && let Some((key, mail)) = feed.next(now)
            {
                self.in_flight += 1;
                // One without content has died for another reason.
                let given_up = feed.given_up_by(mail.n).filter(|_| mail.event.is_some());
                let (sender, generation, subscriber) = (self.finished.0.clone(), feed.generation, *subscriber);
                let (recipient, version) = (feed.recipient.clone(), feed.recipient.version);
                if let Some(by) = given_up {
                    let came = Came::unsent(Reason::Manual, &format!("given up by {by}"));
                    let _ = sender.send(Finished { generation, subscriber, version, key, came });
                    continue;
                }
                let (client, clock) = (self.client.clone(), self.clock.clone());
                tokio::spawn(async move {
                    let came = deliver::deliver(&client, &recipient, &mail, &clock).await;
                    let _ = sender.send(Finished { generation, subscriber, version, key, came });
                });
            }
        }
    }

    /// Feeds with nothing to do are left alone until something happens, or until it is time.
    fn cool(&mut self, now: DateTime<Utc>) {
        let (feeds, timers, in_flight) = (&self.feeds, &mut self.timers, self.in_flight);
        self.hot.retain(|subscriber| {
            let Some(feed) = feeds.get(subscriber) else { return false };
            if let Some(at) = feed.next_look(now) {
                timers.insert((at.max(now + Duration::from_millis(1)), *subscriber));
            }
            !feed.is_idle() || feed.has_news(now) || feed.is_hungry() || feed.commanded || in_flight >= IN_FLIGHT_MAX
        });
    }
}

/// How a task has ended that asked the database.
type Ended<T> = Result<sqlx::Result<T>, tokio::task::JoinError>;

fn flat<T>(ended: Ended<T>) -> Result<T, DispatchError> {
    Ok(ended??)
}

/// Never, if there is nothing to wait for.
async fn ended<T>(task: Option<&mut JoinHandle<T>>) -> Result<T, tokio::task::JoinError> {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DispatchError {
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("{0}")]
    Task(#[from] tokio::task::JoinError),
    #[error("the subscribers cannot be read: {0}")]
    Directory(String),
    #[error(
        "database-restored: this database was restored or copied; say how to go on with `pillarbox recover --from TIME` or `--skip`"
    )]
    Restored,
}

/// PostgreSQL's classes of errors that lie neither in what is asked nor in what there is: connections, rollbacks, locks,
/// resources, operators.
const MAY_PASS: [&str; 6] = ["08", "25", "40", "53", "55", "57"];

impl DispatchError {
    /// Whether the same may succeed later.
    fn may_pass(&self) -> bool {
        match self {
            DispatchError::Database(error) => {
                let code = error.as_database_error().and_then(|error| error.code());
                code.is_none_or(|code| MAY_PASS.iter().any(|class| code.starts_with(class)))
            }
            DispatchError::Task(_) => false,
            DispatchError::Directory(_) | DispatchError::Restored => true,
        }
    }
}

#[cfg(test)]
mod tests;
