//! From an event to a message for each subscriber that it is for.
//!
//! One process at a time does it, in the order of the log, so that a lane is in that order whatever its key is. A batch is
//! one transaction with the cursor's place: messages are made once, and numbered without a gap.

mod directory;

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use chrono::TimeDelta;
use kit::auth::Tenant;
use kit::clock::Clock;
use mailbox::inbox;
use mailbox::log::{Message, SHARDS};
use mailbox::post::Source;
use mailbox::work::{Item, LaneError, LaneId, Outcome, Work, Worked};
use serde::Deserialize;
use serde_json::Value;
use sqlx::PgConnection;
use tokio::sync::mpsc;
use uuid::Uuid;

use self::directory::Directory;
use crate::dispatch::{Event, Mail};
use crate::domain::lane_at;
use crate::store;
use crate::store::fanout::{NewCommand, NewMessage, Retried};

/// Where events come in.
pub(crate) const SOURCE: Source = Source::new("hub");
/// What people want done with messages comes this way; no caller can post here.
pub(crate) const CONTROL: Source = Source::new("hub.control");
pub(crate) const RETRY_DEAD_LETTER: &str = "hub.dead_letter.retry";
pub(crate) const GIVE_UP_MESSAGE: &str = "hub.message.dead_letter";

/// Places in lanes are remembered for so many.
const REMEMBERED_MAX: usize = 100_000;
/// What one transaction makes: more than this is left for the next ones, but for the events of one from each shard.
const MADE_MAX: usize = 50_000;
/// Clocks differ by less.
const MARGIN: TimeDelta = TimeDelta::minutes(1);

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
    /// How many events at a time.
    most: u32,
    /// What is not kept yet, and how many events at a time when it is.
    made: Option<(Fanned, u32)>,
}

/// What a batch leads to.
#[derive(Default)]
struct Batch {
    messages: Vec<NewMessage>,
    events: Vec<Option<Arc<Event>>>,
    unsent: Vec<(i64, Vec<Uuid>, Vec<Uuid>)>,
    commands: Vec<NewCommand>,
    /// Messages, and subscribers that get none.
    size: usize,
}

/// What a message of the log is to fan-out.
enum Meaning {
    Event,
    Wish(Wish),
    /// It is done already, or nobody here knows it.
    Nothing,
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
        let (directory, seqs) = (Directory::default(), HashMap::new());
        FanOut { clock, handing_over, directory, seqs, newest: 0, most: u32::MAX, made: None }
    }

    async fn look(&mut self, tx: &mut PgConnection) -> Result<(), LaneError> {
        let (newest, version) = store::fanout::begin(tx).await?;
        if newest != self.newest || self.seqs.len() > REMEMBERED_MAX {
            self.seqs.clear(); // another process went on, or too much is remembered
            self.newest = newest;
        }
        if version != self.directory.version {
            let interests = store::subscriber::interests(tx).await?;
            self.directory = Directory::new(version, interests);
        }
        Ok(())
    }

    /// What each of these means. What people wish happens once in a run: there is little of it, so all of it is entered in
    /// the inbox. Of events there is much: whether one that is replayed was fanned out before is seen by what came of it.
    async fn meanings(&self, tx: &mut PgConnection, lane: &LaneId, items: &[&Item]) -> Result<Vec<Meaning>, LaneError> {
        let wishes: Vec<(Uuid, i32)> =
            items.iter().filter(|item| is_wish(item)).map(|item| (item.message.message_id, item.run)).collect();
        let fresh = match wishes.is_empty() {
            true => HashSet::new(),
            false => inbox::enter(tx, &lane.consumer, &wishes).await?,
        };
        let repairs = |item: &&&Item| item.is_replayed && item.run == 0 && !is_wish(item);
        let repaired: Vec<&Message> = items.iter().filter(repairs).map(|item| &item.message).collect();
        let known = store::fanout::fanned_out(tx, &repaired).await?;
        let meaning = |item: &&Item| match is_wish(item) {
            true if fresh.contains(&(item.message.message_id, item.run)) => Meaning::wish(&item.message),
            false if is_event(&item.message) && !known.contains(&item.message.id) => Meaning::Event,
            true | false => Meaning::Nothing,
        };
        Ok(items.iter().map(meaning).collect())
    }

    /// All that these lead to, in the order of the log; None if it is too much at a time.
    async fn gather(
        &mut self,
        tx: &mut PgConnection,
        lane: &LaneId,
        items: &[&Item],
    ) -> Result<Option<Batch>, LaneError> {
        let meanings = self.meanings(tx, lane, items).await?;
        let retries: Vec<Uuid> = meanings.iter().filter_map(Meaning::dead_letter).collect();
        let retried = store::fanout::retried(tx, &retries).await?;
        let mut retried: HashMap<Uuid, Retried> = retried.into_iter().map(|found| (found.dead_letter, found)).collect();
        let mut batch = Batch::default();
        for (at, (item, meaning)) in items.iter().zip(meanings).enumerate() {
            match meaning {
                Meaning::Event => self.match_event(item, &mut batch),
                Meaning::Wish(wish) => batch.obey(wish, &mut retried),
                Meaning::Nothing => {}
            }
            if batch.size > MADE_MAX && items.len() > SHARDS as usize {
                // Half of what would have been in time, since the next ones may lead to more.
                self.most = (at as u32 / 2).max(1);
                return Ok(None);
            }
        }
        Ok(Some(batch))
    }

    fn match_event(&mut self, item: &Item, batch: &mut Batch) {
        let message = &item.message;
        let (interests, meant) = self.directory.meant(message);
        if meant.is_empty() {
            return;
        }
        batch.size += meant.len();
        let event = Arc::new(Event::of(message));
        let payload = OnceCell::new();
        let value = || payload.get_or_init(|| parsed(message));
        let (mut filtered, mut inactive) = (Vec::new(), Vec::new());
        for interest in meant.iter().map(|at| &interests[*at]) {
            // A repair makes what was not made then, and for nobody who was not there then.
            if item.is_replayed && item.run == 0 && interest.since > message.at + MARGIN {
                continue;
            }
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
        // If this cannot be kept, for whatever reason, half of it is tried.
        let most = std::mem::replace(&mut self.most, (items.len() as u32 / 2).max(1));
        let mut tx = lane.db.begin().await?;
        self.look(&mut tx).await?;
        let Some(mut batch) = self.gather(&mut tx, lane, items).await? else { return Err(LaneError::TooMuch) };
        let most = most.saturating_mul(2).min(most_for(items.len(), batch.size));
        let after = self.newest;
        self.newest = -1; // until it is kept
        self.number(&mut tx, &mut batch.messages).await?;
        let now = self.clock.now();
        let commanded: Vec<Uuid> = batch.commands.iter().map(|command| command.subscriber).collect();
        store::fanout::append(&mut tx, after, &batch.messages, &commanded, now).await?;
        store::fanout::leave_commands(&mut tx, &batch.commands).await?;
        store::fanout::keep_unsent(&mut tx, &batch.unsent, now).await?;
        self.made = Some((batch.handed_over(after, self.directory.version), most));
        Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: Some(tx) })
    }

    fn kept(&mut self) {
        let Some((made, most)) = self.made.take() else { return };
        (self.newest, self.most) = (made.to, most);
        if made.to > made.after {
            // If there is no room, dispatchers read for themselves.
            let _ = self.handing_over.try_send(made);
        }
    }

    fn most(&self) -> u32 {
        self.most
    }
}

impl Meaning {
    /// Of a message of control. One that this version does not know is passed: while others are upgraded, all events would
    /// wait for it.
    fn wish(message: &Message) -> Meaning {
        let payload = message.payload.get();
        let wish = match message.topic.as_str() {
            RETRY_DEAD_LETTER => serde_json::from_str(payload).map(Wish::Retry).map_err(|error| error.to_string()),
            GIVE_UP_MESSAGE => serde_json::from_str(payload).map(Wish::GiveUp).map_err(|error| error.to_string()),
            _ => Err("nobody here knows this topic".to_owned()),
        };
        wish.map_or_else(
            |error| {
                let (topic, message_id) = (&message.topic, message.message_id);
                tracing::error!(topic, %message_id, error, "what somebody wants done with webhooks is not understood, and passed over");
                Meaning::Nothing
            },
            Meaning::Wish,
        )
    }

    fn dead_letter(&self) -> Option<Uuid> {
        match self {
            Meaning::Wish(Wish::Retry(RetryDeadLetter { dead_letter })) => Some(*dead_letter),
            Meaning::Wish(Wish::GiveUp(_)) | Meaning::Event | Meaning::Nothing => None,
        }
    }
}

fn is_wish(item: &Item) -> bool {
    item.message.source == CONTROL.as_str()
}

/// What services say belongs to the tenant that they live in, whatever they say.
fn is_event(message: &Message) -> bool {
    message.source == SOURCE.as_str() || message.tenant == Tenant::MAIN
}

/// How many events lead to half of what a transaction makes, if they are like these.
fn most_for(events: usize, made: usize) -> u32 {
    u32::try_from(events * (MADE_MAX / 2) / made.max(1)).unwrap_or(u32::MAX).max(1)
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

/// What is posted is JSON, but may be nested more deeply than is sensible: then it has no fields for us.
fn parsed(message: &Message) -> Value {
    serde_json::from_str(message.payload.get()).unwrap_or(Value::Null)
}
