//! From an event to a message for each subscriber that it is for.
//!
//! One process at a time does it, in the order of the log, so that a lane is in that order whatever its key is. A batch is
//! one transaction with the cursor's place: messages are made once, and numbered without a gap.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::Arc;

use kit::clock::Clock;
use kit::secret::Seal;
use mailbox::log::Message;
use mailbox::post::Source;
use mailbox::work::{Item, LaneError, LaneId, Outcome, Work, Worked};
use serde::Deserialize;
use serde_json::Value;
use sqlx::PgConnection;
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::dispatch::{Event, Mail};
use crate::domain::{Subscriber, lane_at};
use crate::store;
use crate::store::fanout::NewMessage;

/// Where events come in.
pub(crate) const SOURCE: Source = Source::new("hub");
/// What people want done with messages comes this way; no caller can post here.
pub(crate) const CONTROL: Source = Source::new("hub.control");
pub(crate) const RETRY_DEAD_LETTER: &str = "hub.dead_letter.retry";
pub(crate) const GIVE_UP_MESSAGE: &str = "hub.message.dead_letter";

/// Places in lanes, and who takes which types, are remembered for so many.
const REMEMBERED_MAX: usize = 100_000;

/// What a batch made, for dispatchers in this process: all messages with numbers above `after`, up to `to`.
pub(crate) struct Fanned {
    pub(crate) after: i64,
    pub(crate) to: i64,
    pub(crate) mails: HashMap<Uuid, Vec<Mail>>,
}

pub(crate) struct FanOut {
    seal: Seal,
    clock: Clock,
    handing_over: mpsc::Sender<Fanned>,
    directory: Directory,
    /// The newest place in each lane, as of the message `newest`.
    seqs: HashMap<(Uuid, String), i64>,
    newest: i64,
    made: Option<Fanned>,
}

/// The subscribers, and by tenant and type which of them are meant.
#[derive(Default)]
struct Directory {
    version: i64,
    subscribers: Vec<Subscriber>,
    meant: HashMap<(String, String), Arc<[usize]>>,
}

/// What a batch leads to.
#[derive(Default)]
struct Batch {
    messages: Vec<NewMessage>,
    events: Vec<Option<Arc<Event>>>,
    unsent: Vec<(i64, Vec<Uuid>, Vec<Uuid>)>,
    commanded: Vec<Uuid>,
}

#[derive(Deserialize)]
struct RetryDeadLetter {
    dead_letter: Uuid,
}

#[derive(Deserialize)]
struct GiveUp {
    subscriber: Uuid,
    n: i64,
    by: String,
}

impl FanOut {
    pub(crate) fn new(seal: Seal, clock: Clock, handing_over: mpsc::Sender<Fanned>) -> FanOut {
        FanOut {
            seal,
            clock,
            handing_over,
            directory: Directory::default(),
            seqs: HashMap::new(),
            newest: 0,
            made: None,
        }
    }

    async fn look(&mut self, tx: &mut PgConnection) -> Result<(), LaneError> {
        let (newest, version) = store::fanout::begin(tx).await?;
        if newest != self.newest || self.seqs.len() > REMEMBERED_MAX {
            self.seqs.clear(); // another process went on, or too much is remembered
            self.newest = newest;
        }
        if version != self.directory.version {
            let known =
                store::subscriber::all(tx, &self.seal).await.map_err(|error| LaneError::Work(error.to_string()))?;
            let subscribers = known.into_iter().map(|known| known.subscriber).collect();
            self.directory = Directory { version, subscribers, meant: HashMap::new() };
        }
        Ok(())
    }

    fn match_event(&mut self, message: &Message, batch: &mut Batch) {
        let meant = self.directory.meant(message);
        if meant.is_empty() {
            return;
        }
        let event = Arc::new(Event::of(message));
        let payload = OnceCell::new();
        let value = || payload.get_or_init(|| parsed(message));
        let (mut filtered, mut inactive) = (Vec::new(), Vec::new());
        for at in meant.iter() {
            let subscriber = &self.directory.subscribers[*at];
            let settings = &subscriber.settings;
            if !settings.is_active {
                inactive.push(subscriber.id);
                continue;
            }
            if settings.filter.as_ref().is_some_and(|filter| !filter.holds(value())) {
                filtered.push(subscriber.id);
                continue;
            }
            let lane = match &settings.ordering_key {
                Some(pointer) => lane_at(value(), pointer),
                None => message.key.clone(),
            };
            batch.messages.push(NewMessage {
                subscriber: subscriber.id,
                lane,
                seq: None,
                place: message.place(),
                dead_letter: None,
            });
            batch.events.push(Some(event.clone()));
        }
        if !filtered.is_empty() || !inactive.is_empty() {
            batch.unsent.push((message.id, filtered, inactive));
        }
    }

    async fn obey(&self, tx: &mut PgConnection, message: &Message, batch: &mut Batch) -> Result<(), LaneError> {
        let not_ours = |error: serde_json::Error| LaneError::Work(format!("{}: {error}", message.topic));
        match message.topic.as_str() {
            RETRY_DEAD_LETTER => {
                let RetryDeadLetter { dead_letter } = serde_json::from_str(message.payload.get()).map_err(not_ours)?;
                let Some(retried) = store::fanout::retried(tx, dead_letter).await? else { return Ok(()) };
                if retried.blocks {
                    store::fanout::command(tx, retried.subscriber, retried.n, "retry", "").await?;
                    batch.commanded.push(retried.subscriber);
                    return Ok(());
                }
                batch.messages.push(NewMessage {
                    subscriber: retried.subscriber,
                    lane: retried.lane,
                    seq: None,
                    place: retried.place,
                    dead_letter: Some(dead_letter),
                });
                batch.events.push(None);
            }
            GIVE_UP_MESSAGE => {
                let GiveUp { subscriber, n, by } = serde_json::from_str(message.payload.get()).map_err(not_ours)?;
                store::fanout::command(tx, subscriber, n, "dead_letter", &by).await?;
                batch.commanded.push(subscriber);
            }
            _ => {}
        }
        Ok(())
    }

    /// Gives each message of a lane its place there.
    async fn number(&mut self, tx: &mut PgConnection, messages: &mut [NewMessage]) -> sqlx::Result<()> {
        let lane_of = |message: &NewMessage| message.lane.clone().map(|lane| (message.subscriber, lane));
        let mut unknown: Vec<(Uuid, String)> =
            messages.iter().filter_map(lane_of).filter(|lane| !self.seqs.contains_key(lane)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if !unknown.is_empty() {
            let seqs = store::fanout::newest_seqs(tx, &unknown).await?;
            self.seqs.extend(unknown.into_iter().zip(seqs));
        }
        for message in messages {
            if let Some(seq) = lane_of(message).and_then(|lane| self.seqs.get_mut(&lane)) {
                *seq += 1;
                message.seq = Some(*seq);
            }
        }
        Ok(())
    }
}

impl Work for FanOut {
    async fn run(&mut self, lane: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
        self.made = None;
        let mut tx = lane.db.begin().await?;
        self.look(&mut tx).await?;
        let mut batch = Batch::default();
        for item in items {
            match item.message.source == CONTROL.as_str() {
                true => self.obey(&mut tx, &item.message, &mut batch).await?,
                false => self.match_event(&item.message, &mut batch),
            }
        }
        let after = self.newest;
        self.newest = -1; // until it is kept
        self.number(&mut tx, &mut batch.messages).await?;
        let now = self.clock.now();
        store::fanout::append(&mut tx, after, &batch.messages, &batch.commanded, now).await?;
        store::fanout::keep_unsent(&mut tx, &batch.unsent, now).await?;
        self.made = Some(batch.handed_over(after));
        Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: Some(tx) })
    }

    fn kept(&mut self) {
        let Some(made) = self.made.take() else { return };
        self.newest = made.to;
        if made.to > made.after {
            // If there is no room, dispatchers read for themselves.
            let _ = self.handing_over.try_send(made);
        }
    }
}

impl Batch {
    fn handed_over(self, after: i64) -> Fanned {
        let used = match (self.messages.len(), self.commanded.is_empty()) {
            (0, true) => 0,
            (count, _) => (count as i64).max(1),
        };
        let mut mails: HashMap<Uuid, Vec<Mail>> = HashMap::new();
        let mut is_whole = self.commanded.is_empty();
        for ((n, message), event) in (after + 1..).zip(self.messages).zip(self.events) {
            is_whole &= event.is_some();
            let lane = message.lane.map(Arc::from);
            mails.entry(message.subscriber).or_default().push(Mail { n, lane, seq: message.seq, event });
        }
        // What is sent again has its content elsewhere: such a batch is read from the database.
        match is_whole {
            true => Fanned { after, to: after + used, mails },
            false => Fanned { after: after + used, to: after + used, mails: HashMap::new() },
        }
    }
}

impl Directory {
    fn meant(&mut self, message: &Message) -> Arc<[usize]> {
        let key = (message.tenant.clone(), message.topic.clone());
        if let Some(meant) = self.meant.get(&key) {
            return meant.clone();
        }
        let is_meant = |subscriber: &Subscriber| {
            subscriber.tenant.as_str() == message.tenant
                && subscriber.settings.event_types.iter().any(|types| types.include(&message.topic))
        };
        let meant: Arc<[usize]> = (0..self.subscribers.len()).filter(|at| is_meant(&self.subscribers[*at])).collect();
        if self.meant.len() > REMEMBERED_MAX {
            self.meant.clear();
        }
        self.meant.insert(key, meant.clone());
        meant
    }
}

/// What is posted is JSON, but may be nested more deeply than is sensible: then it has no fields for us.
fn parsed(message: &Message) -> Value {
    serde_json::from_str(message.payload.get()).unwrap_or(Value::Null)
}
