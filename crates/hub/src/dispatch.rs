//! Sending: from the messages of a subscriber to its endpoint, and back to what came of it.
//!
//! Subscribers are shared out among processes by shard; one process at a time sends to a subscriber, so its lanes, limits
//! and breaker are in one place. A [`feed::Feed`] knows all of one subscriber and decides; the loop here reads for
//! feeds, sends what they say, and keeps what came of it, many at a time. No transaction is open while anything is sent.

pub(crate) mod deliver;
pub(crate) mod feed;
mod mail;
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
pub(crate) use self::mail::{Event, Mail, Recipient, Snapshot};
use crate::client::Client;
use crate::domain::{Reason, Verdict};
use crate::fanout::Fanned;
use crate::store;
use crate::store::dispatch::{News, Read, Wishes};

/// How often to look for news when nobody in this process tells them.
const NEWS_PAUSE: Duration = Duration::from_millis(20);
const IDLE_NEWS_PAUSE: Duration = Duration::from_millis(100);
/// Outcomes are kept together: it saves a quarter of the database's work.
const SAVE_LINGER: Duration = Duration::from_millis(10);
const SAVE_AT_ONCE: usize = 1_000;
/// After the database was away.
const AGAIN_PAUSE: Duration = Duration::from_millis(200);
/// The directory is read no more often, however often it changes.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);
/// Over all subscribers of this process.
const IN_FLIGHT_MAX: usize = 4_096;
/// Subscribers, and lanes, that are read for at a time; so many lanes of one subscriber.
const READS_MAX: usize = 64;
const LANE_READS_MAX: usize = 8;
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

    fn news_pause(&self) -> Duration {
        if self.told_at.elapsed() > Duration::from_secs(2) { IDLE_NEWS_PAUSE } else { NEWS_PAUSE }
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

    /// Fan-out in this process has made messages.
    fn hear(&mut self, fanned: Fanned) {
        if fanned.after != self.told_to || self.version == 0 {
            return; // something lies between: the news tell
        }
        self.told_to = fanned.to;
        self.told_at = tokio::time::Instant::now();
        self.newest_version = self.newest_version.max(fanned.version);
        for (subscriber, mails) in fanned.mails {
            // Else it is another process's, or a new one, which reads for itself once it is known.
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.hand_over(mails);
                self.hot.insert(subscriber);
            }
        }
    }

    fn learn(&mut self, news: News) {
        self.newest_version = self.newest_version.max(news.version);
        if news.newest > self.told_to {
            self.told_to = news.newest;
            self.told_at = tokio::time::Instant::now();
            for subscriber in news.subscribers {
                if let Some(feed) = self.feeds.get_mut(&subscriber) {
                    (feed.behind, feed.commanded) = (true, true);
                    self.hot.insert(subscriber);
                }
            }
        }
    }

    fn take_in(&mut self, read: Ended<Read>) -> Result<(), DispatchError> {
        let Some((wishes, _)) = self.reading.take() else { return Ok(()) };
        let mut read = match flat(read) {
            Ok(read) => read,
            Err(error) => {
                for (subscriber, _, _) in wishes.feeds {
                    if let Some(feed) = self.feeds.get_mut(&subscriber) {
                        (feed.reading, feed.behind) = (false, true);
                    }
                }
                for (subscriber, wish) in wishes.lanes {
                    if let Some(feed) = self.feeds.get_mut(&subscriber) {
                        feed.unread(wish);
                    }
                }
                for subscriber in wishes.commands {
                    if let Some(feed) = self.feeds.get_mut(&subscriber) {
                        feed.commanded = true;
                    }
                }
                self.again_at = Some(tokio::time::Instant::now() + AGAIN_PAUSE);
                return Err(error);
            }
        };
        let now = self.clock.now();
        for (subscriber, _, most) in wishes.feeds {
            let mails = read.feeds.remove(&subscriber).unwrap_or_default();
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.reading = false;
                let complete = mails.len() < most;
                feed.offer(mails, complete);
                self.hot.insert(subscriber);
            }
        }
        for (subscriber, wish) in wishes.lanes {
            let mails = read.lanes.remove(&(subscriber, wish.key.clone())).unwrap_or_default();
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.offer_lane(&wish, mails);
                self.hot.insert(subscriber);
            }
        }
        for (subscriber, command) in read.commands {
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.command(command, now);
                self.hot.insert(subscriber);
            }
        }
        Ok(())
    }

    fn saved(&mut self, saved: Ended<bool>) -> Result<(), DispatchError> {
        let Some((save, _)) = self.saving.take() else { return Ok(()) };
        self.saved_at = tokio::time::Instant::now();
        match flat(saved) {
            Ok(true) => {
                count(&save);
                Ok(())
            }
            Ok(false) => {
                tracing::warn!("others have taken over; what was under way is theirs to send");
                self.forget();
                Ok(())
            }
            Err(error) if error.may_pass() => {
                self.unsaved = Some(save);
                self.again_at = Some(tokio::time::Instant::now() + AGAIN_PAUSE);
                Err(error)
            }
            // It would be refused for ever. What it told of is sent again.
            Err(error) => {
                self.forget();
                Err(error)
            }
        }
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
                let unsent = match (&mail.event, feed.given_up_by(mail.n)) {
                    (None, _) => Some((Reason::Expired, "the log no longer has it".to_owned())),
                    (Some(_), Some(by)) => Some((Reason::Manual, format!("given up by {by}"))),
                    (Some(_), None) => None,
                };
                let (sender, generation, subscriber) = (self.finished.0.clone(), feed.generation, *subscriber);
                let (recipient, version) = (feed.recipient.clone(), feed.recipient.version);
                if let Some((reason, detail)) = unsent {
                    let came = Came::unsent(reason, &detail);
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

    fn save(&mut self, now: DateTime<Utc>) {
        if self.saving.is_some() || (self.unsaved.is_none() && self.is_time_to_look()) {
            return;
        }
        if let Some(save) = self.unsaved.take() {
            return self.keep(save, now);
        }
        let news = self.hot.iter().filter(|id| self.feeds.get(id).is_some_and(|feed| feed.has_news(now)));
        let count = news.take(SAVE_AT_ONCE).count();
        if count > 0 && (count == SAVE_AT_ONCE || self.saved_at.elapsed() >= SAVE_LINGER) {
            let save = self.news(now);
            self.keep(save, now);
        }
    }

    /// Keeps all that there is, and waits for it: who is given a shard must find what came of its messages.
    async fn flush(&mut self) -> Result<(), DispatchError> {
        if self.has_news() {
            let now = self.clock.now();
            let save = self.news(now);
            self.keep(save, now);
        }
        if self.saving.is_some() {
            let saved = ended(self.saving.as_mut().map(|(_, saving)| saving)).await;
            self.saved(saved)?;
        }
        Ok(())
    }

    fn has_news(&self) -> bool {
        let now = self.clock.now();
        self.hot.iter().any(|id| self.feeds.get(id).is_some_and(|feed| feed.has_news(now)))
    }

    /// What is to be kept of all feeds.
    fn news(&mut self, now: DateTime<Utc>) -> Arc<Save> {
        let mut save = Save::default();
        for subscriber in &self.hot {
            if let Some(feed) = self.feeds.get_mut(subscriber)
                && feed.has_news(now)
            {
                feed.save(now, &mut save);
            }
        }
        Arc::new(save)
    }

    fn keep(&mut self, save: Arc<Save>, now: DateTime<Utc>) {
        if save.is_empty() {
            return; // what there is waits a little, to be kept with more
        }
        let (db, fence, kept) = (self.db.clone(), self.share.fence(), save.clone());
        let saving = tokio::spawn(async move { store::dispatch::keep(&db, fence, &kept, now).await });
        self.saving = Some((save, saving));
    }

    fn read(&mut self, now: DateTime<Utc>) {
        if self.reading.is_some() {
            return;
        }
        let mut wishes = Wishes::default();
        // Each time it is another's turn to be the first.
        self.turn = self.turn.wrapping_add(1);
        let from = self.turn % self.hot.len().max(1);
        for subscriber in self.hot.iter().skip(from).chain(self.hot.iter().take(from)) {
            if wishes.feeds.len().max(wishes.lanes.len()).max(wishes.commands.len()) >= READS_MAX {
                break;
            }
            let Some(feed) = self.feeds.get_mut(subscriber) else { continue };
            if std::mem::take(&mut feed.commanded) {
                wishes.commands.push(*subscriber);
            }
            if let Some((after, most)) = feed.wish() {
                (feed.reading, feed.behind) = (true, false);
                wishes.feeds.push((*subscriber, after, most));
            }
            let most = LANE_READS_MAX.min(READS_MAX - wishes.lanes.len());
            wishes.lanes.extend(feed.lane_wishes(now, most).into_iter().map(|wish| (*subscriber, wish)));
        }
        if wishes.feeds.is_empty() && wishes.lanes.is_empty() && wishes.commands.is_empty() {
            return;
        }
        let (db, wished) = (self.db.clone(), wishes.clone());
        let reading = tokio::spawn(async move { store::dispatch::read(&db, &wished).await });
        self.reading = Some((wishes, reading));
    }

    fn ask(&mut self) {
        if self.asking.is_some() || self.version == 0 || self.told_at.max(self.asked_at).elapsed() < self.news_pause() {
            return;
        }
        self.asked_at = tokio::time::Instant::now();
        let (db, after) = (self.db.clone(), self.told_to);
        self.asking = Some(tokio::spawn(async move { store::dispatch::news(&db, after).await }));
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

fn count(save: &Save) {
    let latency = metrics::histogram!("eventhub_delivery_latency_seconds");
    let mut counts: HashMap<&'static str, u64> = HashMap::new();
    for attempt in &save.attempts {
        *counts.entry(attempt.outcome.as_str()).or_default() += 1;
        if attempt.came.unsent.is_none() {
            latency.record(attempt.came.latency.as_secs_f64());
        }
    }
    for (outcome, count) in counts {
        metrics::counter!("eventhub_messages_delivered_total", "outcome" => outcome).increment(count);
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
