//! The in-app inbox: lists and changes, and the streams of new notifications.
//!
//! A stream sends the notifications of its user in the order of their numbers. The numbers are assigned under the lock of the
//! inbox, so what is visible up to a number never changes: a client that repeats the last number that it has got misses
//! nothing and gets nothing twice, whichever process it is connected to. After a failover that lost transactions, numbers are
//! assigned again; so the id of an event also has the time of the notification, by which the stream finds its position.
//!
//! One worker of the process watches for all streams. It polls one number, that of the last notification which any
//! transaction has begun to insert. Only while that advances, and some time longer because the transactions have yet to
//! commit, it compares the inboxes of the connected users with what they have seen, in one query. A stream makes no
//! query while its user gets nothing.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use futures_util::stream::{self, Stream};
use http_kit::admission::caller_share::{RequestCaller, request_caller};
use http_kit::event_stream::StreamEvent;
use http_kit::page::PAGE_BYTES_MAX;
use pillarbox::database::{Database, SHORT_STEP_TIME_MAX};
use runtime::worker::Round;
use sqlx::{PgConnection, Postgres, Transaction};
use tokio::sync::{Semaphore, watch};
use uuid::Uuid;

use crate::error::Error;
use crate::flow::requests::Recorder;
use crate::store::inbox::{self as store, InboxChange, InboxEntry, InboxFilter, InboxState, LoadLimits};
use crate::templates::Templates;
use crate::view::inbox::InboxItem;

/// Transactions that insert notifications have committed or failed after this time.
const COMMIT_TIME_MAX: Duration = Duration::from_secs(30);
/// The inboxes are compared at least this often.
const COMPARE_PAUSE_MAX: Duration = Duration::from_secs(15);
/// The shortest time between two comparisons.
const COALESCING_TIME: Duration = Duration::from_millis(10);
/// Comparisons take at most a fifth of the time, up to this pause: many connected users must not load the database.
const COMPARE_PAUSE_FACTOR: u32 = 4;
const COALESCING_TIME_MAX: Duration = Duration::from_secs(5);
/// The notifications that a stream loads at a time. They occupy memory until the client has read them.
const BATCH: LoadLimits = LoadLimits { count: 100, bytes: 64 * 1024 };
/// Notifications that one transaction marks as read.
const READ_STEP: i32 = 5_000;
/// Streams that load notifications at the same time, so that they leave connections of the pool to requests.
const LOADS_MAX: usize = 2;

/// A user's notifications with what is needed to render them.
#[derive(Debug)]
pub(crate) struct ShownEntries {
    pub(crate) entries: Vec<InboxEntry>,
    pub(crate) name: String,
    pub(crate) locale: String,
}

pub(crate) async fn list(
    db: &Database,
    user: Uuid,
    filter: InboxFilter,
    before: Option<i64>,
    limit: u32,
) -> Result<ShownEntries, Error> {
    let mut db = db.acquire().await?;
    let limits = LoadLimits { count: limit, bytes: PAGE_BYTES_MAX };
    let entries = store::list(&mut db, user, filter, before, limits).await?;
    let (name, locale) = store::reader(&mut db, user).await?;
    Ok(ShownEntries { entries, name, locale })
}

pub(crate) async fn one(db: &Database, user: Uuid, seq: i64) -> Result<ShownEntries, Error> {
    let mut db = db.acquire().await?;
    let entry = store::one(&mut db, user, seq).await?.ok_or(Error::InboxItemNotFound)?;
    let (name, locale) = store::reader(&mut db, user).await?;
    Ok(ShownEntries { entries: vec![entry], name, locale })
}

pub(crate) async fn state(db: &Database, user: Uuid) -> Result<InboxState, Error> {
    Ok(store::state(&mut *db.acquire().await?, user).await?)
}

/// Changes one notification. Fails if the user has no such notification.
pub(crate) async fn change(
    tx: &mut Transaction<'_, Postgres>,
    user: Uuid,
    seq: i64,
    change: InboxChange,
) -> Result<InboxState, Error> {
    store::lock(tx, user).await?.ok_or(Error::InboxItemNotFound)?;
    let difference = store::change(tx, user, seq, change).await?.ok_or(Error::InboxItemNotFound)?;
    Ok(store::add_unread(tx, user, difference).await?)
}

/// Marks notifications up to this number as read, the next ones of at most [`READ_STEP`]; those that have arrived since the client
/// has seen it stay unread. Returns None if there are more: they belong in another transaction, because a transaction that
/// notifies the user waits for the lock of the inbox.
pub(crate) async fn read_next(
    tx: &mut Transaction<'_, Postgres>,
    user: Uuid,
    up_to: i64,
) -> Result<Option<InboxState>, Error> {
    if store::lock(tx, user).await?.is_none() {
        return Ok(Some(InboxState::default()));
    }
    let read = store::read_up_to(tx, user, up_to, READ_STEP).await?;
    let state = store::add_unread(tx, user, -read).await?;
    Ok((read < READ_STEP).then_some(state))
}

/// The streams of this process.
pub(crate) struct InboxStreams {
    db: Database,
    users: Mutex<HashMap<Uuid, ConnectedUser>>,
    loads: Semaphore,
}

struct ConnectedUser {
    streams: usize,
    /// The last number of the inbox, as far as this process knows.
    last_seq: watch::Sender<i64>,
}

/// The state of the watching worker.
#[derive(Debug, Default)]
pub(crate) struct WatchState {
    last_begun: Option<i64>,
    /// Until then, transactions that have begun may commit.
    busy_until: Option<Instant>,
    compared_at: Option<Instant>,
}

/// The registration of a stream. Dropping it ends the registration.
struct Registration {
    streams: Arc<InboxStreams>,
    user: Uuid,
    last_seq: watch::Receiver<i64>,
}

impl InboxStreams {
    pub(crate) fn new(db: Database) -> InboxStreams {
        InboxStreams { db, users: Mutex::default(), loads: Semaphore::new(LOADS_MAX) }
    }

    /// A stream of the user's notifications after the position `after`, in batches; None: after the newest one.
    pub(crate) async fn open(
        self: &Arc<Self>,
        recorder: Arc<Recorder>,
        user: Uuid,
        after: Option<StreamPosition>,
    ) -> Result<impl Stream<Item = Vec<StreamEvent>> + Send + use<>, Error> {
        // Registered before the inbox is read: what commits later is noticed.
        let registration = self.register(user);
        let mut db = self.db.acquire().await?;
        let last_seq = store::state(&mut db, user).await?.last_seq;
        self.advance(&[(user, last_seq)]);
        let position = match after {
            Some(after) => after.resolve(&mut db, user, last_seq).await?,
            None => last_seq,
        };
        drop(db);
        let open = OpenStream { registration, recorder, position, caller: request_caller() };
        Ok(stream::unfold(open, OpenStream::next))
    }

    fn register(self: &Arc<Self>, user: Uuid) -> Registration {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let connected =
            users.entry(user).or_insert_with(|| ConnectedUser { streams: 0, last_seq: watch::Sender::new(0) });
        connected.streams += 1;
        Registration { streams: Arc::clone(self), user, last_seq: connected.last_seq.subscribe() }
    }

    /// Ends all streams, because the database may have lost transactions: numbers that were sent are then assigned again. The
    /// clients connect again, and what they continue with is compared with the database.
    pub(crate) fn end_all(&self) {
        self.users.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Tells the streams of users that their inboxes have advanced.
    fn advance(&self, advanced: &[(Uuid, i64)]) {
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        for (user, last_seq) in advanced {
            if let Some(connected) = users.get(user) {
                connected.last_seq.send_if_modified(|known| {
                    let is_new = *last_seq > *known;
                    *known = (*known).max(*last_seq);
                    is_new
                });
            }
        }
    }

    /// The last numbers that the connected users have seen.
    fn known(&self) -> HashMap<Uuid, i64> {
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.iter().map(|(user, connected)| (*user, *connected.last_seq.borrow())).collect()
    }

    /// Notices new notifications of connected users, of whichever process.
    pub(crate) async fn watch(&self, watched: &mut WatchState) -> Result<Round, sqlx::Error> {
        let connected = self.users.lock().unwrap_or_else(PoisonError::into_inner).len();
        metrics::gauge!("pillarbox_inbox_users_connected").set(connected as f64);
        if connected == 0 {
            return Ok(Round::Idle);
        }
        let mut db = self.db.acquire().await?;
        let last_begun = store::last_begun(&mut db).await?;
        let now = Instant::now();
        if watched.last_begun.replace(last_begun) != Some(last_begun) {
            watched.busy_until = Some(now + COMMIT_TIME_MAX);
        }
        let is_busy = watched.busy_until.is_some_and(|until| now < until);
        let is_old = watched.compared_at.is_none_or(|at| now.duration_since(at) >= COMPARE_PAUSE_MAX);
        if is_busy || is_old {
            let started = Instant::now();
            let advanced = store::advanced(&mut db, &self.known()).await?;
            watched.compared_at = Some(now);
            self.advance(&advanced);
            drop(db);
            // Commits that follow each other closely are noticed together.
            let pause = started.elapsed() * COMPARE_PAUSE_FACTOR;
            tokio::time::sleep(pause.clamp(COALESCING_TIME, COALESCING_TIME_MAX)).await;
        }
        Ok(Round::Idle)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut users = self.streams.users.lock().unwrap_or_else(PoisonError::into_inner);
        // After `end_all`, the entry of the user may be another one.
        let is_same = |connected: &&mut ConnectedUser| connected.last_seq.subscribe().same_channel(&self.last_seq);
        if let Some(connected) = users.get_mut(&self.user).filter(is_same) {
            connected.streams -= 1;
            if connected.streams == 0 {
                users.remove(&self.user);
            }
        }
    }
}

struct OpenStream {
    registration: Registration,
    recorder: Arc<Recorder>,
    /// The number of the last notification that was sent.
    position: i64,
    /// Whose share of the connections it uses.
    caller: RequestCaller,
}

impl OpenStream {
    /// Waits for the next notifications. None ends the stream: the client connects again, and continues where it was.
    async fn next(mut self) -> Option<(Vec<StreamEvent>, OpenStream)> {
        loop {
            if *self.registration.last_seq.borrow_and_update() <= self.position {
                self.registration.last_seq.changed().await.ok()?;
                continue;
            }
            // In a box: the future of an idle stream would have its size otherwise.
            let shown = match Box::pin(self.caller.run(self.load())).await {
                Ok(shown) => shown,
                Err(error) => {
                    tracing::debug!(%error, "a stream of notifications ends, because the database failed");
                    return None;
                }
            };
            let Some(last) = shown.entries.last() else {
                // Those up to the known number were deleted.
                self.position = *self.registration.last_seq.borrow();
                continue;
            };
            self.position = last.seq;
            let events = events(&self.recorder.templates, &shown);
            return Some((events, self));
        }
    }

    async fn load(&self) -> Result<ShownEntries, Error> {
        let streams = &self.registration.streams;
        // Before the slot, which all streams share: they must not wait for the share of one caller.
        let _share = streams.db.admit().await?;
        let _slot = streams.loads.acquire().await;
        streams
            .db
            .step("inbox stream", SHORT_STEP_TIME_MAX, async {
                let mut db = streams.db.acquire().await?;
                let entries = store::after(&mut db, self.registration.user, self.position, BATCH).await?;
                let (name, locale) = store::reader(&mut db, self.registration.user).await?;
                Ok(ShownEntries { entries, name, locale })
            })
            .await
    }
}

/// The position of a client in a stream: the last notification that it has got. As the id of an event it is
/// `<number>-<time in microseconds>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamPosition {
    pub(crate) seq: i64,
    /// When the notification was created; None if the client does not know it.
    pub(crate) created_at: Option<DateTime<Utc>>,
}

impl StreamPosition {
    /// Returns the number after which the stream continues.
    async fn resolve(self, db: &mut PgConnection, user: Uuid, last_seq: i64) -> Result<i64, Error> {
        let StreamPosition { seq, created_at } = self;
        let Some(created_at) = created_at else {
            // A number that was never assigned is the mistake of a client, or of a database that lost transactions.
            return Ok(seq.min(last_seq));
        };
        if seq <= last_seq {
            match store::created_at(db, user, seq).await? {
                // Without a row, it was deleted after its retention.
                None => return Ok(seq),
                Some(known) if known == created_at => return Ok(seq),
                Some(_) => {}
            }
        }
        // The database has lost the notification, and has assigned its number again or will do so.
        Ok(store::last_until(db, user, created_at).await?)
    }
}

impl FromStr for StreamPosition {
    type Err = ();

    fn from_str(text: &str) -> Result<StreamPosition, ()> {
        let number = |text: &str| text.parse().ok().filter(|number| *number >= 0).ok_or(());
        let (seq, created_at) = match text.split_once('-') {
            None => (text, None),
            Some((seq, time)) => (seq, Some(DateTime::from_timestamp_micros(number(time)?).ok_or(())?)),
        };
        Ok(StreamPosition { seq: number(seq)?, created_at })
    }
}

impl fmt::Display for StreamPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.seq)?;
        self.created_at.map_or(Ok(()), |time| write!(f, "-{}", time.timestamp_micros()))
    }
}

fn events(templates: &Templates, shown: &ShownEntries) -> Vec<StreamEvent> {
    let event = |entry: &InboxEntry| {
        let item = InboxItem::new(entry.clone(), templates, &shown.name, &shown.locale);
        // Views are structs of plain values, which always serialize.
        let data = serde_json::to_string(&item).unwrap_or_default();
        let position = StreamPosition { seq: entry.seq, created_at: Some(entry.created_at) };
        StreamEvent { id: position.to_string(), name: "notification", data }
    };
    shown.entries.iter().map(event).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_an_event_is_its_number_and_time_and_a_number_alone_is_accepted() {
        let created_at = DateTime::from_timestamp_micros(1_800_000_000_123_456);
        let position = StreamPosition { seq: 17, created_at };
        assert_eq!(position.to_string(), "17-1800000000123456");
        assert_eq!("17-1800000000123456".parse(), Ok(position));
        assert_eq!("17".parse(), Ok(StreamPosition { seq: 17, created_at: None }));
        for invalid in ["", "-", "x", "-1", "1-", "1-x", "1--2", "1-2-3", "1-9223372036854775807"] {
            assert_eq!(invalid.parse::<StreamPosition>(), Err(()), "{invalid}");
        }
    }
}
