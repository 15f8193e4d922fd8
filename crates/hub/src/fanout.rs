//! Fan-out: creates a hub message for each subscriber that an event matches, and a stream message for each stream.
//!
//! Fan-out is a consumer of the log. One process at a time runs it, in the order of the log, so that a lane has that order
//! whatever its ordering key is. A batch and the consumer's position commit in one transaction, so every hub message is
//! created once, and hub messages are numbered without a gap.
//!
//! Events of a tenant that has more than its share of the work are deferred, and processed in turns with those of others:
//! see [`shares`] and [`turns`]. In turns with them it advances replays, which send events again: [`replays`].

mod batch;
mod directory;
mod replays;
mod shares;
mod streams;
mod turns;

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use chrono::TimeDelta;
use kit::clock::Clock;
use mailbox::consumers::{BatchResult, ConsumerError, Delivery, Outcome, Processor, WorkerContext, inbox};
use mailbox::database::Incarnation;
use mailbox::log::{Message, SHARDS};
use sqlx::{PgConnection, Postgres, Transaction};
use tokio::sync::mpsc;
use uuid::Uuid;

use self::batch::Batch;
use self::directory::Directory;
use self::replays::{ReplayTurn, Replays};
use self::shares::{Backlog, NARROW, Pace, Shares, Turn};
use self::streams::StreamSequences;
use crate::domain::{Backfill, Interest, part_of};
use crate::event_selection::EventSelection;
use crate::hub_message::{DirectoryVersion, FannedBatch, HubEvent, without_replay};
use crate::operator_command::{CONTROL_SOURCE, CommandRequest};
use crate::replay::{lane_of, parse_payload};
use crate::store;
use crate::store::deferred_event::{self, NewDeferred};
use crate::store::fanout::{DeadLetterToRetry, NewMessage};
use crate::store::stream_message::NewStreamMessage;
use crate::stream_waiters::StreamWaiters;
use crate::system_event;

/// Bounds the lanes whose newest sequence number is cached.
const CACHED_LANES_MAX: usize = 100_000;
/// Hub messages that one transaction creates. A batch that would create more is split, unless it is already as small as one
/// event of each shard. A transaction of this size takes some ten milliseconds, for which later events wait.
const BATCH_MESSAGES_MAX: usize = 5_000;
/// Allowance for clock skew between replicas.
const CLOCK_SKEW: TimeDelta = TimeDelta::minutes(1);

pub(crate) struct FanOut {
    clock: Clock,
    events: EventSelection,
    handing_over: mpsc::Sender<FannedBatch>,
    /// The pulls of this process that wait for stream messages.
    stream_waiters: StreamWaiters,
    directory: Directory,
    sequences: LaneSequences,
    stream_sequences: StreamSequences,
    /// How many log messages the next batch may contain.
    batch_limit: u32,
    /// The tenants with deferred events. None: they have to be loaded.
    backlog: Option<Backlog>,
    pace: Pace,
    /// The tenant that had the last turn, also if the turn failed.
    last_turn: Option<String>,
    /// The replays to advance. None: they have to be loaded.
    replays: Option<Replays>,
    /// The replay that had the last turn, also if the turn failed.
    last_replay: Option<Uuid>,
    /// The next turn belongs to a replay, if both a replay and a tenant wait for one.
    is_replays_turn: bool,
    uncommitted: Option<Uncommitted>,
}

/// What a transaction changes in memory when it commits.
struct Uncommitted {
    batch: FannedBatch,
    /// Streams with new messages.
    streams: Vec<Uuid>,
    batch_limit: u32,
    /// Tenants whose events were deferred.
    deferred: HashSet<String>,
    has_changed_replays: bool,
    turn: Option<DeferredTurn>,
}

/// A turn between the batches of new events.
enum DeferredTurn {
    Tenant(Turn),
    Replay(Box<ReplayTurn>),
}

/// How an event reaches fan-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Live,
    /// A replay of the log repairs what the live run has missed.
    Repair,
    /// It was deferred, with this id.
    Deferred(i64),
}

/// The newest sequence number of each lane, valid as long as `newest` is the newest hub message of the same incarnation of
/// the database.
#[derive(Default)]
struct LaneSequences {
    by_lane: HashMap<(Uuid, String), i64>,
    incarnation: Option<Incarnation>,
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
    pub(crate) fn new(
        clock: Clock,
        events: EventSelection,
        handing_over: mpsc::Sender<FannedBatch>,
        stream_waiters: StreamWaiters,
    ) -> FanOut {
        FanOut {
            clock,
            events,
            handing_over,
            stream_waiters,
            directory: Directory::default(),
            sequences: LaneSequences::default(),
            stream_sequences: StreamSequences::default(),
            batch_limit: u32::MAX,
            backlog: None,
            pace: Pace::default(),
            last_turn: None,
            replays: None,
            last_replay: None,
            is_replays_turn: false,
            uncommitted: None,
        }
    }

    /// Loads the subscribers if they have changed, and the tenants with deferred events if they are not known. Drops cached
    /// sequence numbers that are no longer valid. Returns the version of the directory.
    async fn refresh(&mut self, tx: &mut PgConnection) -> Result<DirectoryVersion, ConsumerError> {
        let (newest, version) = store::fanout::begin(tx).await?;
        self.sequences.validate(newest, version.incarnation);
        if self.directory.version != Some(version) {
            let mut interests = store::subscriber::load_interests(tx).await?;
            interests.extend(store::stream::load_interests(tx).await?);
            // Turns continue by this order.
            interests.sort_unstable_by_key(|interest| interest.subscriber);
            self.directory = Directory::new(version, interests);
        }
        if self.backlog.is_none() {
            let tenants = deferred_event::tenants(tx).await?;
            self.backlog = Some(Backlog::new(tenants, self.last_turn.as_deref()));
        }
        if self.replays.is_none() {
            self.replays = Some(Replays::new(store::replay::runnable(tx).await?, self.last_replay));
        }
        Ok(version)
    }

    /// What each message means. Commands are few, so the inbox ensures that each is executed once per run. Events are many:
    /// whether a replayed event was fanned out before is derived from its hub messages.
    async fn meanings(
        &self,
        tx: &mut PgConnection,
        context: &WorkerContext,
        items: &[&Delivery],
    ) -> Result<Vec<Meaning>, ConsumerError> {
        let commands: Vec<&Delivery> = items.iter().copied().filter(|item| is_command(item)).collect();
        let new_commands = match commands.is_empty() {
            true => HashSet::new(),
            false => inbox::insert(tx, &context.consumer, &commands).await?,
        };
        let is_repair = |item: &&&Delivery| is_repair(item) && !is_command(item);
        let repaired: Vec<&Message> = items.iter().filter(is_repair).map(|item| &item.message).collect();
        let fanned_out = store::fanout::fanned_out(tx, &repaired).await?;
        let meaning = |item: &&Delivery| match is_command(item) {
            true if new_commands.contains(&(item.message.message_id, item.run)) => Meaning::of_command(&item.message),
            false if self.events.is_event(&item.message) && !fanned_out.contains(&item.message.id) => Meaning::Event,
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
        let (mut batch, mut shares) = (Batch::default(), Shares::new(self.pace.share()));
        for (at, (item, meaning)) in items.iter().zip(meanings).enumerate() {
            match meaning {
                Meaning::Event => self.match_event(item, &mut shares, &mut batch),
                Meaning::Command(request) => batch.add_command(request, &mut dead_letters),
                Meaning::Nothing => {}
            }
            if batch.size > BATCH_MESSAGES_MAX && items.len() > SHARDS as usize {
                // Half of what would have fitted, because the next events may match more subscribers.
                self.batch_limit = (at as u32 / 2).max(1);
                return Ok(None);
            }
        }
        if batch.size > 0 {
            self.pace.notice_others(Instant::now());
        }
        Ok(Some(batch))
    }

    /// Adds a hub message for each subscriber that the event matches. Defers the event if its tenant has deferred events, or
    /// would exceed its share of this batch.
    fn match_event<'a>(&mut self, item: &'a Delivery, shares: &mut Shares<'a>, batch: &mut Batch) {
        let (message, origin) = (&item.message, if is_repair(item) { Origin::Repair } else { Origin::Live });
        let (interests, matching) = self.directory.matching(message);
        if matching.is_empty() {
            return;
        }
        let tenant = message.tenant.as_str();
        let has_backlog = self.backlog.as_ref().is_some_and(|backlog| backlog.contains(tenant));
        if has_backlog || batch.deferred_tenants.contains(tenant) || shares.exceeds(tenant, matching.len()) {
            let (tenant, log_ref) = (tenant.to_owned(), message.log_ref());
            return batch.defer(NewDeferred { tenant, log_ref, matches: matching.len() });
        }
        if matching.len() > NARROW {
            batch.wide += matching.len();
        }
        add_messages(message, origin, matching.iter().map(|at| &interests[*at]), batch);
    }

    /// Numbers and inserts what a batch leads to. Returns it for the dispatcher of this process, and the streams with new
    /// messages.
    async fn write(
        &mut self,
        tx: &mut PgConnection,
        mut batch: Batch,
        version: DirectoryVersion,
    ) -> Result<(FannedBatch, Vec<Uuid>), ConsumerError> {
        let after = self.sequences.assign(tx, &mut batch.messages).await?;
        let now = self.clock.now();
        if let Some(from) = batch.needs_retention_hold(now) {
            store::maintenance::extend_retention_hold(tx, from).await?;
        }
        let commanded: Vec<Uuid> = batch.commands.iter().map(|command| command.subscriber).collect();
        store::fanout::append(tx, after, &batch.messages, &commanded, now).await?;
        store::fanout::insert_commands(tx, &batch.commands).await?;
        store::fanout::insert_skipped(tx, &batch.skipped, now).await?;
        deferred_event::insert(tx, &batch.deferred).await?;
        let streamed = std::mem::take(&mut batch.stream_messages);
        let streams = self.stream_sequences.append(tx, streamed, version.incarnation, now).await?;
        Ok((batch.into_fanned(after, version), streams))
    }

    /// Runs the turn of a replay or of a tenant with deferred events, alternately. None if nothing can be done now.
    async fn run_next_turn(&mut self, tx: &mut PgConnection) -> Result<Option<(Batch, DeferredTurn)>, ConsumerError> {
        self.is_replays_turn = !self.is_replays_turn;
        if self.is_replays_turn
            && let Some((batch, turn)) = self.run_replay(tx).await?
        {
            return Ok(Some((batch, DeferredTurn::Replay(Box::new(turn)))));
        }
        if let Some((batch, turn)) = self.run_turn(tx).await? {
            return Ok(Some((batch, DeferredTurn::Tenant(turn))));
        }
        let replayed = if self.is_replays_turn { None } else { self.run_replay(tx).await? };
        Ok(replayed.map(|(batch, turn)| (batch, DeferredTurn::Replay(Box::new(turn)))))
    }

    /// Creates the hub messages of a batch in a transaction, and returns it.
    async fn fan_out(&mut self, context: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        self.uncommitted = None;
        // If this batch fails, for whatever reason, the next one has half its size.
        let previous_limit = std::mem::replace(&mut self.batch_limit, (items.len() as u32 / 2).max(1));
        let mut tx = context.db.begin().await?;
        let version = self.refresh(&mut tx).await?;
        let Some(mut batch) = self.collect(&mut tx, context, items).await? else {
            return Err(ConsumerError::BatchTooLarge);
        };
        // The share of its tenant bounds what an event with many matches leads to; smaller batches would not.
        let batch_limit = previous_limit.saturating_mul(2).min(limit_for(items.len(), batch.size - batch.wide));
        let (deferred, has_changed_replays) = (std::mem::take(&mut batch.deferred_tenants), batch.has_changed_replays);
        let (batch, streams) = self.write(&mut tx, batch, version).await?;
        self.uncommitted = Some(Uncommitted { batch, streams, batch_limit, deferred, has_changed_replays, turn: None });
        Ok(BatchResult { outcomes: vec![Outcome::Done; items.len()], tx: Some(tx) })
    }
}

impl Processor for FanOut {
    async fn process(&mut self, context: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        context.step("fan out", self.fan_out(context, items)).await
    }

    fn deferred_due(&self) -> Option<Instant> {
        let turn_at = self.pace.next_turn_at().unwrap_or_else(Instant::now);
        match (&self.backlog, &self.replays) {
            (Some(backlog), Some(replays)) if backlog.is_empty() => replays.next_due().map(|due| due.max(turn_at)),
            // Both are loaded in the first turn.
            (Some(_), Some(_)) | (None, _) | (_, None) => Some(turn_at),
        }
    }

    async fn process_deferred(
        &mut self,
        context: &WorkerContext,
    ) -> Result<Option<Transaction<'static, Postgres>>, ConsumerError> {
        self.uncommitted = None;
        let mut tx = context.db.begin().await?;
        let version = self.refresh(&mut tx).await?;
        let Some((batch, turn)) = self.run_next_turn(&mut tx).await? else { return Ok(None) };
        let ((batch, streams), batch_limit) = (self.write(&mut tx, batch, version).await?, self.batch_limit);
        let (deferred, has_changed_replays, turn) = (HashSet::new(), false, Some(turn));
        self.uncommitted = Some(Uncommitted { batch, streams, batch_limit, deferred, has_changed_replays, turn });
        Ok(Some(tx))
    }

    fn committed(&mut self) {
        let Some(uncommitted) = self.uncommitted.take() else { return };
        let Uncommitted { batch, streams, batch_limit, deferred, has_changed_replays, turn } = uncommitted;
        (self.sequences.newest, self.batch_limit) = (batch.to, batch_limit);
        self.stream_sequences.commit();
        self.stream_waiters.wake(&streams);
        if let Some(backlog) = &mut self.backlog {
            deferred.iter().for_each(|tenant| backlog.add(tenant));
            match turn {
                Some(DeferredTurn::Tenant(turn)) => {
                    turn.report_lost();
                    self.pace.finish_turn(turn.started_at, Instant::now());
                    backlog.finish(turn);
                }
                Some(DeferredTurn::Replay(turn)) => {
                    self.pace.finish_turn(turn.started_at, Instant::now());
                    if let Some(replays) = &mut self.replays {
                        replays.finish(*turn);
                    }
                }
                None => {}
            }
        }
        if has_changed_replays {
            self.replays = None;
        }
        if batch.to > batch.after {
            // If the channel is full, the dispatcher reads the messages from the database.
            let _ = self.handing_over.try_send(batch);
        }
    }

    fn reset(&mut self) {
        (self.directory, self.sequences, self.uncommitted) = (Directory::default(), LaneSequences::default(), None);
        (self.backlog, self.replays, self.stream_sequences) = (None, None, StreamSequences::default());
    }

    fn batch_limit(&self) -> u32 {
        self.batch_limit
    }
}

impl LaneSequences {
    /// Drops the cache if another process has created hub messages, if the numbers may be those of lost messages, or if
    /// the cache is too large.
    fn validate(&mut self, newest: i64, incarnation: Option<Incarnation>) {
        let is_current = newest == self.newest && incarnation == self.incarnation;
        if !is_current || self.by_lane.len() > CACHED_LANES_MAX {
            self.by_lane.clear();
            (self.newest, self.incarnation) = (newest, incarnation);
        }
    }

    /// Gives each message of a lane the next sequence number there. Returns the number of the newest hub message before
    /// this batch.
    async fn assign(&mut self, tx: &mut PgConnection, messages: &mut [NewMessage]) -> sqlx::Result<i64> {
        let after = std::mem::replace(&mut self.newest, UNCOMMITTED);
        // The lanes of a replay have no numbers.
        let lane_of = |message: &NewMessage| {
            let lane = message.lane.as_ref().filter(|lane| without_replay(lane, message.replay).is_none())?;
            Some((message.subscriber, lane.clone()))
        };
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
            Meaning::Command(CommandRequest::DeadLetter(_) | CommandRequest::ReplayChanged(_))
            | Meaning::Event
            | Meaning::Nothing => None,
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

/// Whether an event creates nothing for a subscriber that it matches.
fn is_excluded(interest: &Interest, message: &Message, origin: Origin) -> bool {
    let is_covered = match (interest.backfill, origin) {
        // The backfill reads what fan-out has read: it creates the message.
        (Some(Backfill::Active), _) => true,
        (Some(Backfill::Ended { deferred_to }), Origin::Deferred(id)) => id <= deferred_to,
        (Some(Backfill::Ended { .. }), Origin::Live | Origin::Repair) | (None, _) => false,
    };
    // A repair, or a deferred event, creates nothing for a subscriber that did not exist when the event was posted.
    is_covered || (origin != Origin::Live && interest.since > message.at + CLOCK_SKEW)
}

/// Adds a hub message, or the record that it is skipped, for each of the subscribers.
fn add_messages<'a>(
    message: &Message,
    origin: Origin,
    matching: impl ExactSizeIterator<Item = &'a Interest>,
    batch: &mut Batch,
) {
    if matching.len() == 0 {
        return;
    }
    batch.size += matching.len();
    let event = Arc::new(HubEvent::from_log(message));
    let payload = OnceCell::new();
    let value = || payload.get_or_init(|| parse_payload(message));
    let (mut filtered, mut inactive) = (Vec::new(), Vec::new());
    for interest in matching {
        if is_excluded(interest, message, origin) {
            continue;
        }
        // Otherwise a report about a failing subscriber would fail, too, and lead to the next report.
        if system_event::is_about(message, interest.subscriber) {
            continue;
        }
        if !interest.is_active {
            inactive.push(interest.subscriber);
            continue;
        }
        if interest.filter.as_ref().is_some_and(|filter| !filter.matches(value())) {
            // The outcomes of an event are those of subscribers.
            if !interest.is_stream {
                filtered.push(interest.subscriber);
            }
            continue;
        }
        let lane = lane_of(interest, message, value);
        if interest.is_stream {
            let part = part_of(lane.as_deref(), message.message_id);
            let (stream, log_ref) = (interest.subscriber, message.log_ref());
            batch.stream_messages.push(NewStreamMessage { stream, part, lane, seq: None, log_ref });
            continue;
        }
        batch.add_message(interest.subscriber, lane, message.log_ref(), event.clone());
    }
    batch.add_skipped(message.id, filtered, inactive);
}

/// How many events lead to half of [`BATCH_MESSAGES_MAX`], if they match as many subscribers as these did.
fn limit_for(events: usize, messages: usize) -> u32 {
    u32::try_from(events * (BATCH_MESSAGES_MAX / 2) / messages.max(1)).unwrap_or(u32::MAX).max(1)
}
