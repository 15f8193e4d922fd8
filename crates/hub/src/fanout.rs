//! From an event to a message for each subscriber that it is for.
//!
//! One process at a time does it, in the order of the log, so that a lane is in that order whatever its key is. A batch is
//! one transaction with the cursor's place: messages are made once, and numbered without a gap.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::Arc;

use kit::clock::Clock;
use mailbox::log::Message;
use mailbox::post::Source;
use mailbox::work::{Item, LaneError, LaneId, Outcome, Work, Worked};
use serde::Deserialize;
use serde_json::Value;
use sqlx::PgConnection;
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::dispatch::{Event, Mail};
use crate::domain::{Interest, lane_at};
use crate::store;
use crate::store::fanout::{NewCommand, NewMessage, Retried};

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
    /// Of the directory that it was made with.
    pub(crate) version: i64,
}

pub(crate) struct FanOut {
    clock: Clock,
    handing_over: mpsc::Sender<Fanned>,
    directory: Directory,
    /// The newest place in each lane, as of the message `newest`.
    seqs: HashMap<(Uuid, String), i64>,
    newest: i64,
    made: Option<Fanned>,
}

/// Who is sent what, and by tenant and type which of them are meant.
#[derive(Default)]
struct Directory {
    version: i64,
    interests: Vec<Interest>,
    meant: HashMap<(String, String), Arc<[usize]>>,
}

/// What a batch leads to.
#[derive(Default)]
struct Batch {
    messages: Vec<NewMessage>,
    events: Vec<Option<Arc<Event>>>,
    unsent: Vec<(i64, Vec<Uuid>, Vec<Uuid>)>,
    commands: Vec<NewCommand>,
}

/// What people want done.
enum Wish {
    Retry(RetryDeadLetter),
    GiveUp(GiveUp),
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
    pub(crate) fn new(clock: Clock, handing_over: mpsc::Sender<Fanned>) -> FanOut {
        FanOut { clock, handing_over, directory: Directory::default(), seqs: HashMap::new(), newest: 0, made: None }
    }

    async fn look(&mut self, tx: &mut PgConnection) -> Result<(), LaneError> {
        let (newest, version) = store::fanout::begin(tx).await?;
        if newest != self.newest || self.seqs.len() > REMEMBERED_MAX {
            self.seqs.clear(); // another process went on, or too much is remembered
            self.newest = newest;
        }
        if version != self.directory.version {
            let interests = store::subscriber::interests(tx).await?;
            self.directory = Directory { version, interests, meant: HashMap::new() };
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
            let interest = &self.directory.interests[*at];
            if !interest.is_active {
                inactive.push(interest.subscriber);
                continue;
            }
            if interest.filter.as_ref().is_some_and(|filter| !filter.holds(value())) {
                filtered.push(interest.subscriber);
                continue;
            }
            let lane = match &interest.ordering_key {
                Some(pointer) => lane_at(value(), pointer),
                None => message.key.clone(),
            };
            batch.messages.push(NewMessage {
                subscriber: interest.subscriber,
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
        let mut wishes = Vec::with_capacity(items.len());
        for item in items {
            wishes.push(Wish::of(&item.message)?);
        }
        let retries: Vec<Uuid> = wishes.iter().filter_map(Option::as_ref).filter_map(Wish::dead_letter).collect();
        let retried = store::fanout::retried(&mut tx, &retries).await?;
        let mut retried: HashMap<Uuid, Retried> = retried.into_iter().map(|found| (found.dead_letter, found)).collect();
        // In the order of the log, whatever each is.
        let mut batch = Batch::default();
        for (item, wish) in items.iter().zip(wishes) {
            match wish {
                Some(wish) => batch.obey(wish, &mut retried),
                None => self.match_event(&item.message, &mut batch),
            }
        }
        let after = self.newest;
        self.newest = -1; // until it is kept
        self.number(&mut tx, &mut batch.messages).await?;
        let now = self.clock.now();
        let commanded: Vec<Uuid> = batch.commands.iter().map(|command| command.subscriber).collect();
        store::fanout::append(&mut tx, after, &batch.messages, &commanded, now).await?;
        store::fanout::leave_commands(&mut tx, &batch.commands).await?;
        store::fanout::keep_unsent(&mut tx, &batch.unsent, now).await?;
        self.made = Some(batch.handed_over(after, self.directory.version));
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

impl Wish {
    /// None: it is an event.
    fn of(message: &Message) -> Result<Option<Wish>, LaneError> {
        if message.source != CONTROL.as_str() {
            return Ok(None);
        }
        let not_ours = |error: serde_json::Error| LaneError::Work(format!("{}: {error}", message.topic));
        let payload = message.payload.get();
        match message.topic.as_str() {
            RETRY_DEAD_LETTER => serde_json::from_str(payload).map(|wish| Some(Wish::Retry(wish))).map_err(not_ours),
            GIVE_UP_MESSAGE => serde_json::from_str(payload).map(|wish| Some(Wish::GiveUp(wish))).map_err(not_ours),
            other => Err(LaneError::Work(format!("nobody knows what `{other}` means"))),
        }
    }

    fn dead_letter(&self) -> Option<Uuid> {
        match self {
            Wish::Retry(RetryDeadLetter { dead_letter }) => Some(*dead_letter),
            Wish::GiveUp(_) => None,
        }
    }
}

impl Batch {
    fn obey(&mut self, wish: Wish, retried: &mut HashMap<Uuid, Retried>) {
        match wish {
            Wish::Retry(RetryDeadLetter { dead_letter }) => match retried.remove(&dead_letter) {
                Some(Retried { subscriber, n, blocks: true, .. }) => {
                    self.commands.push(NewCommand { subscriber, n, what: "retry", by: String::new() });
                }
                Some(Retried { subscriber, lane, place, .. }) => {
                    let dead_letter = Some(dead_letter);
                    self.messages.push(NewMessage { subscriber, lane, seq: None, place, dead_letter });
                    self.events.push(None);
                }
                // Its subscriber is gone.
                None => {}
            },
            Wish::GiveUp(GiveUp { subscriber, n, by }) => {
                self.commands.push(NewCommand { subscriber, n, what: "dead_letter", by });
            }
        }
    }

    fn handed_over(self, after: i64, version: i64) -> Fanned {
        let used = match (self.messages.len(), self.commands.is_empty()) {
            (0, true) => 0,
            (count, _) => (count as i64).max(1),
        };
        let mut mails: HashMap<Uuid, Vec<Mail>> = HashMap::new();
        let mut is_whole = self.commands.is_empty();
        for ((n, message), event) in (after + 1..).zip(self.messages).zip(self.events) {
            is_whole &= event.is_some();
            let lane = message.lane.map(Arc::from);
            mails.entry(message.subscriber).or_default().push(Mail { n, lane, seq: message.seq, event });
        }
        // What is sent again has its content elsewhere: such a batch is read from the database.
        match is_whole {
            true => Fanned { after, to: after + used, mails, version },
            false => Fanned { after: after + used, to: after + used, mails: HashMap::new(), version },
        }
    }
}

impl Directory {
    fn meant(&mut self, message: &Message) -> Arc<[usize]> {
        let key = (message.tenant.clone(), message.topic.clone());
        if let Some(meant) = self.meant.get(&key) {
            return meant.clone();
        }
        let is_meant = |interest: &Interest| {
            interest.tenant.as_str() == message.tenant
                && interest.event_types.iter().any(|types| types.include(&message.topic))
        };
        let meant: Arc<[usize]> = (0..self.interests.len()).filter(|at| is_meant(&self.interests[*at])).collect();
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
