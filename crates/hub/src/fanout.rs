//! Fan-out: creates a hub message for each subscriber that an event matches.
//!
//! Fan-out is a consumer of the log. One process at a time runs it, in the order of the log, so that a lane has that order
//! whatever its ordering key is. A batch and the consumer's position commit in one transaction, so every hub message is
//! created once, and hub messages are numbered without a gap.

mod batch;
mod directory;

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use chrono::TimeDelta;
use kit::auth::Tenant;
use kit::clock::Clock;
use mailbox::consumers::{BatchResult, ConsumerError, Delivery, Outcome, Processor, WorkerContext, inbox};
use mailbox::log::{Message, SHARDS};
use serde_json::Value;
use sqlx::PgConnection;
use tokio::sync::mpsc;
use uuid::Uuid;

use self::batch::Batch;
use self::directory::Directory;
use crate::domain::lane_at;
use crate::hub_message::{EVENT_SOURCE, FannedBatch, HubEvent};
use crate::operator_command::{CONTROL_SOURCE, CommandRequest};
use crate::store;
use crate::store::fanout::{DeadLetterToRetry, NewMessage};

/// Bounds the lanes whose newest sequence number is cached.
const CACHED_LANES_MAX: usize = 100_000;
/// Hub messages that one transaction creates. A batch that would create more is split, unless it is already as small as one
/// event of each shard.
const BATCH_MESSAGES_MAX: usize = 50_000;
/// Allowance for clock skew between replicas.
const CLOCK_SKEW: TimeDelta = TimeDelta::minutes(1);

pub(crate) struct FanOut {
    clock: Clock,
    handing_over: mpsc::Sender<FannedBatch>,
    directory: Directory,
    sequences: LaneSequences,
    /// How many log messages the next batch may contain.
    batch_limit: u32,
    /// The batch of the transaction that is not committed yet, and the batch limit after its commit.
    uncommitted: Option<(FannedBatch, u32)>,
}

/// The newest sequence number of each lane, valid as long as `newest` is the newest hub message.
struct LaneSequences {
    by_lane: HashMap<(Uuid, String), i64>,
    /// [`UNCOMMITTED`] while a transaction is open.
    newest: i64,
}

/// Sentinel: the cached sequence numbers include a transaction that is not committed. If it fails, they must not be used.
const UNCOMMITTED: i64 = -1;

/// What a message of the log means to fan-out.
enum Meaning {
    Event,
    Command(CommandRequest),
    /// It was processed before, or this version does not know it.
    Nothing,
}

impl FanOut {
    pub(crate) fn new(clock: Clock, handing_over: mpsc::Sender<FannedBatch>) -> FanOut {
        let sequences = LaneSequences { by_lane: HashMap::new(), newest: 0 };
        FanOut {
            clock,
            handing_over,
            directory: Directory::default(),
            sequences,
            batch_limit: u32::MAX,
            uncommitted: None,
        }
    }

    /// Loads the subscribers if they have changed, and drops cached sequence numbers that are no longer valid.
    async fn refresh(&mut self, tx: &mut PgConnection) -> Result<(), ConsumerError> {
        let (newest, version) = store::fanout::begin(tx).await?;
        self.sequences.validate(newest);
        if version != self.directory.version {
            let interests = store::subscriber::load_interests(tx).await?;
            self.directory = Directory::new(version, interests);
        }
        Ok(())
    }

    /// What each message means. Commands are few, so the inbox ensures that each is executed once per run. Events are many:
    /// whether a replayed event was fanned out before is derived from its hub messages.
    async fn meanings(
        &self,
        tx: &mut PgConnection,
        context: &WorkerContext,
        items: &[&Delivery],
    ) -> Result<Vec<Meaning>, ConsumerError> {
        let commands: Vec<(Uuid, i32)> =
            items.iter().filter(|item| is_command(item)).map(|item| (item.message.message_id, item.run)).collect();
        let new_commands = match commands.is_empty() {
            true => HashSet::new(),
            false => inbox::insert(tx, &context.consumer, &commands).await?,
        };
        let is_repair = |item: &&&Delivery| is_repair(item) && !is_command(item);
        let repaired: Vec<&Message> = items.iter().filter(is_repair).map(|item| &item.message).collect();
        let fanned_out = store::fanout::fanned_out(tx, &repaired).await?;
        let meaning = |item: &&Delivery| match is_command(item) {
            true if new_commands.contains(&(item.message.message_id, item.run)) => Meaning::of_command(&item.message),
            false if is_event(&item.message) && !fanned_out.contains(&item.message.id) => Meaning::Event,
            true | false => Meaning::Nothing,
        };
        Ok(items.iter().map(meaning).collect())
    }

    /// Everything that these messages lead to, in the order of the log. None if it is too much for one transaction.
    async fn collect(
        &mut self,
        tx: &mut PgConnection,
        context: &WorkerContext,
        items: &[&Delivery],
    ) -> Result<Option<Batch>, ConsumerError> {
        let meanings = self.meanings(tx, context, items).await?;
        let retries: Vec<Uuid> = meanings.iter().filter_map(Meaning::dead_letter).collect();
        let found = store::fanout::dead_letters_to_retry(tx, &retries).await?;
        let mut dead_letters: HashMap<Uuid, DeadLetterToRetry> =
            found.into_iter().map(|found| (found.dead_letter, found)).collect();
        let mut batch = Batch::default();
        for (at, (item, meaning)) in items.iter().zip(meanings).enumerate() {
            match meaning {
                Meaning::Event => self.match_event(item, &mut batch),
                Meaning::Command(request) => batch.add_command(request, &mut dead_letters),
                Meaning::Nothing => {}
            }
            if batch.size > BATCH_MESSAGES_MAX && items.len() > SHARDS as usize {
                // Half of what would have fitted, because the next events may match more subscribers.
                self.batch_limit = (at as u32 / 2).max(1);
                return Ok(None);
            }
        }
        Ok(Some(batch))
    }

    /// Adds a hub message for each subscriber that the event matches.
    fn match_event(&mut self, item: &Delivery, batch: &mut Batch) {
        let message = &item.message;
        let (interests, matching) = self.directory.matching(message);
        if matching.is_empty() {
            return;
        }
        batch.size += matching.len();
        let event = Arc::new(HubEvent::from_log(message));
        let payload = OnceCell::new();
        let value = || payload.get_or_init(|| parse_payload(message));
        let (mut filtered, mut inactive) = (Vec::new(), Vec::new());
        for interest in matching.iter().map(|at| &interests[*at]) {
            // A repair creates only what was missing then: nothing for a subscriber that did not exist then.
            if is_repair(item) && interest.since > message.at + CLOCK_SKEW {
                continue;
            }
            if !interest.is_active {
                inactive.push(interest.subscriber);
                continue;
            }
            if interest.filter.as_ref().is_some_and(|filter| !filter.matches(value())) {
                filtered.push(interest.subscriber);
                continue;
            }
            let lane = match &interest.ordering_key {
                Some(pointer) => lane_at(value(), pointer),
                None => message.key.clone(),
            };
            batch.add_message(interest.subscriber, lane, message.log_ref(), event.clone());
        }
        batch.add_skipped(message.id, filtered, inactive);
    }

    /// Creates the hub messages of a batch in a transaction, and returns it.
    async fn fan_out(&mut self, context: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        self.uncommitted = None;
        // If this batch fails, for whatever reason, the next one has half its size.
        let previous_limit = std::mem::replace(&mut self.batch_limit, (items.len() as u32 / 2).max(1));
        let mut tx = context.db.begin().await?;
        self.refresh(&mut tx).await?;
        let Some(mut batch) = self.collect(&mut tx, context, items).await? else {
            return Err(ConsumerError::BatchTooLarge);
        };
        let batch_limit = previous_limit.saturating_mul(2).min(limit_for(items.len(), batch.size));
        let after = self.sequences.assign(&mut tx, &mut batch.messages).await?;
        let now = self.clock.now();
        let commanded: Vec<Uuid> = batch.commands.iter().map(|command| command.subscriber).collect();
        store::fanout::append(&mut tx, after, &batch.messages, &commanded, now).await?;
        store::fanout::insert_commands(&mut tx, &batch.commands).await?;
        store::fanout::insert_skipped(&mut tx, &batch.skipped, now).await?;
        self.uncommitted = Some((batch.into_fanned(after, self.directory.version), batch_limit));
        Ok(BatchResult { outcomes: vec![Outcome::Done; items.len()], tx: Some(tx) })
    }
}

impl Processor for FanOut {
    async fn process(&mut self, context: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        context.step("fan out", self.fan_out(context, items)).await
    }

    fn committed(&mut self) {
        let Some((batch, batch_limit)) = self.uncommitted.take() else { return };
        (self.sequences.newest, self.batch_limit) = (batch.to, batch_limit);
        if batch.to > batch.after {
            // If the channel is full, the dispatcher reads the messages from the database.
            let _ = self.handing_over.try_send(batch);
        }
    }

    fn batch_limit(&self) -> u32 {
        self.batch_limit
    }
}

impl LaneSequences {
    /// Drops the cache if another process has created hub messages, or if it is too large.
    fn validate(&mut self, newest: i64) {
        if newest != self.newest || self.by_lane.len() > CACHED_LANES_MAX {
            self.by_lane.clear();
            self.newest = newest;
        }
    }

    /// Gives each message of a lane the next sequence number there. Returns the number of the newest hub message before
    /// this batch.
    async fn assign(&mut self, tx: &mut PgConnection, messages: &mut [NewMessage]) -> sqlx::Result<i64> {
        let after = std::mem::replace(&mut self.newest, UNCOMMITTED);
        let lane_of = |message: &NewMessage| message.lane.clone().map(|lane| (message.subscriber, lane));
        let mut unknown: Vec<(Uuid, String)> =
            messages.iter().filter_map(lane_of).filter(|lane| !self.by_lane.contains_key(lane)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if !unknown.is_empty() {
            let newest = store::fanout::newest_sequences(tx, &unknown).await?;
            self.by_lane.extend(unknown.into_iter().zip(newest));
        }
        for message in messages {
            if let Some(seq) = lane_of(message).and_then(|lane| self.by_lane.get_mut(&lane)) {
                *seq += 1;
                message.seq = Some(*seq);
            }
        }
        Ok(after)
    }
}

impl Meaning {
    /// An unknown command is logged and skipped. If fan-out waited for a version that knows it, all events would wait, too.
    fn of_command(message: &Message) -> Meaning {
        match CommandRequest::decode(message) {
            Ok(request) => Meaning::Command(request),
            Err(error) => {
                let (topic, message_id) = (&message.topic, message.message_id);
                tracing::error!(topic, %message_id, error, "an operator command cannot be decoded and is skipped");
                Meaning::Nothing
            }
        }
    }

    fn dead_letter(&self) -> Option<Uuid> {
        match self {
            Meaning::Command(CommandRequest::Retry(request)) => Some(request.dead_letter),
            Meaning::Command(CommandRequest::DeadLetter(_)) | Meaning::Event | Meaning::Nothing => None,
        }
    }
}

fn is_command(item: &Delivery) -> bool {
    item.message.source == CONTROL_SOURCE.as_str()
}

/// Whether the message is replayed in run 0: the replay repairs what the live run has missed.
fn is_repair(item: &Delivery) -> bool {
    item.is_replayed && item.run == 0
}

/// The messages of a service are events of the tenant that the services live in, whatever tenant they carry.
fn is_event(message: &Message) -> bool {
    message.source == EVENT_SOURCE.as_str() || message.tenant == Tenant::MAIN
}

/// How many events lead to half of [`BATCH_MESSAGES_MAX`], if they match as many subscribers as these did.
fn limit_for(events: usize, messages: usize) -> u32 {
    u32::try_from(events * (BATCH_MESSAGES_MAX / 2) / messages.max(1)).unwrap_or(u32::MAX).max(1)
}

/// Every payload is JSON, but it may be nested too deeply for the parser: then it has no fields to match.
fn parse_payload(message: &Message) -> Value {
    serde_json::from_str(message.payload.get()).unwrap_or(Value::Null)
}
