//! Fan-out: creates a hub message for each subscriber that an event matches, and a stream message for each stream.
//!
//! Fan-out is a consumer of the log. One process at a time runs it, in the order of the log, so that a lane has that order
//! whatever its ordering key is. A batch and the consumer's position commit in one transaction, so every hub message is
//! created once, and hub messages are numbered without a gap.
//!
//! Events that were posted in SQL are checked first: [`checks`]. Events of a tenant that has more than its share of the work are
//! deferred, and processed alternately with those of others: see [`shares`] and [`turns`]. Between their turns it advances replays,
//! which send events again: [`replays`].

pub(crate) mod backlog;
pub(crate) mod batch;
pub(crate) mod checks;
mod directory;
mod matching;
mod meaning;
mod replays;
mod sequences;
mod shares;
mod store;
mod streams;
mod turns;

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use pillarbox::consumers::{BatchResult, ConsumerError, Delivery, Outcome, Processor, WorkerContext, inbox};
use pillarbox::log::{Message, SHARDS};
use runtime::clock::Clock;
use sqlx::{PgConnection, Postgres, Transaction};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::events;

pub(crate) use self::checks::SqlChecks;

use self::batch::Batch;
use self::checks::{NotAccepted, Verdicts};
use self::directory::Directory;
use self::matching::{Origin, add_messages};
use self::meaning::{Meaning, is_command, is_repair};
use self::replays::{ReplayTurn, Replays};
use self::sequences::LaneSequences;
use self::shares::{Backlog, NARROW, Pace, Shares, Turn};
use self::streams::StreamSequences;
use crate::deliveries::message::FannedBatch;
use crate::directory::domain::DirectoryVersion;
use crate::events::selection::EventSelection;
use crate::events::store::deferred::NewDeferred;
use crate::fanout::store::{DeadLetterToRetry, FanOutStart};
use crate::streams::waiters::StreamWaiters;

/// Hub messages that one transaction creates. A batch that would create more is split, unless it is already as small as one
/// event of each shard. A transaction of this size takes some ten milliseconds, for which later events wait.
const BATCH_MESSAGES_MAX: usize = 5_000;
/// The pause before fan-out looks again whether a check has ended.
const CHECK_PAUSE: Duration = Duration::from_millis(5);

pub(crate) struct FanOut {
    clock: Clock,
    events: EventSelection,
    handing_over: mpsc::Sender<FannedBatch>,
    /// The pulls of this process that wait for stream messages.
    stream_waiters: StreamWaiters,
    checks: SqlChecks,
    directory: Directory,
    sequences: LaneSequences,
    stream_sequences: StreamSequences,
    /// How many log messages the next batch may contain.
    batch_limit: u32,
    /// The tenants with deferred events. None: they have to be loaded.
    backlog: Option<Backlog>,
    pace: Pace,
    /// The replays to advance. None: they have to be loaded.
    replays: Option<Replays>,
    last_turns: LastTurns,
    uncommitted: Option<Uncommitted>,
}

/// Who had the last turns, also if the turns failed.
#[derive(Debug, Default)]
struct LastTurns {
    tenant: Option<String>,
    replay: Option<Uuid>,
    /// Whether the last one was the turn of a replay, if both a replay and a tenant waited for one.
    is_replays_turn: bool,
}

/// The changes in memory that a transaction makes when it commits.
struct Uncommitted {
    batch: FannedBatch,
    /// Streams with new messages.
    streams: Vec<Uuid>,
    batch_limit: u32,
    /// Tenants whose events were deferred.
    deferred: HashSet<String>,
    has_changed_replays: bool,
    has_accepted_events: bool,
    rejected: usize,
    turn: Option<DeferredTurn>,
}

/// A turn between the batches of new events.
enum DeferredTurn {
    Tenant(Turn),
    Replay(Box<ReplayTurn>),
}

impl FanOut {
    pub(crate) fn new(
        clock: Clock,
        events: EventSelection,
        handing_over: mpsc::Sender<FannedBatch>,
        stream_waiters: StreamWaiters,
        checks: SqlChecks,
    ) -> FanOut {
        FanOut {
            clock,
            events,
            handing_over,
            stream_waiters,
            checks,
            directory: Directory::default(),
            sequences: LaneSequences::default(),
            stream_sequences: StreamSequences::default(),
            batch_limit: u32::MAX,
            backlog: None,
            pace: Pace::default(),
            replays: None,
            last_turns: LastTurns::default(),
            uncommitted: None,
        }
    }

    /// Loads the subscribers if they have changed, and the tenants with deferred events if they are not known. Drops cached
    /// sequence numbers that are no longer valid. Returns the version of the directory.
    async fn refresh(&mut self, tx: &mut PgConnection) -> Result<DirectoryVersion, ConsumerError> {
        let FanOutStart { newest, version } = store::begin(tx).await?;
        self.sequences.validate(newest, version.incarnation);
        if self.directory.version != Some(version) {
            let mut interests = crate::directory::store::load_interests(tx, None).await?;
            interests.extend(crate::streams::store::load_interests(tx).await?);
            // Turns continue by this order.
            interests.sort_unstable_by_key(|interest| interest.subscriber);
            self.directory = Directory::new(version, interests);
        }
        if self.backlog.is_none() {
            let tenants = events::store::deferred::tenants(tx).await?;
            self.backlog = Some(Backlog::new(tenants, self.last_turns.tenant.as_deref()));
        }
        if self.replays.is_none() {
            self.replays = Some(Replays::new(crate::replays::store::runnable(tx).await?, self.last_turns.replay));
        }
        Ok(version)
    }

    /// The meaning of each message. Commands are few, so the inbox ensures that each is executed once per run. Events are many:
    /// whether a replayed event was fanned out before is derived from its hub messages.
    async fn meanings(
        &self,
        tx: &mut PgConnection,
        context: &WorkerContext,
        items: &[&Delivery],
    ) -> Result<Vec<Meaning>, ConsumerError> {
        let commands: Vec<&Delivery> = items.iter().copied().filter(|item| is_command(item)).collect();
        let new_commands =
            if commands.is_empty() { HashSet::new() } else { inbox::insert(tx, &context.consumer, &commands).await? };
        let is_repair = |item: &&&Delivery| is_repair(item) && !is_command(item);
        let repaired: Vec<&Message> = items.iter().filter(is_repair).map(|item| &item.message).collect();
        let mut fanned_out = store::fanned_out(tx, &repaired).await?;
        // A retry creates the messages of an event that was rejected.
        let repaired: Vec<i64> = repaired.iter().map(|message| message.id).collect();
        fanned_out.extend(events::store::rejected::among(tx, &repaired).await?.into_keys());
        let meaning = |item: &&Delivery| {
            let message = &item.message;
            if new_commands.contains(&(message.message_id, item.run)) {
                Meaning::of_command(message)
            } else if !is_command(item) && self.events.is_event(message) && !fanned_out.contains(&message.id) {
                Meaning::Event
            } else {
                Meaning::Nothing
            }
        };
        Ok(items.iter().map(meaning).collect())
    }

    /// Everything that these messages lead to, in the order of the log. None if it is too much for one transaction.
    async fn collect(
        &mut self,
        tx: &mut PgConnection,
        context: &WorkerContext,
        items: &[&Delivery],
        verdicts: &mut Verdicts,
    ) -> Result<Option<Batch>, ConsumerError> {
        let meanings = self.meanings(tx, context, items).await?;
        let retries: Vec<Uuid> = meanings.iter().filter_map(Meaning::dead_letter).collect();
        let found = store::dead_letters_to_retry(tx, &retries).await?;
        let mut dead_letters: HashMap<Uuid, DeadLetterToRetry> =
            found.into_iter().map(|found| (found.dead_letter, found)).collect();
        let (mut batch, mut shares) = (Batch::default(), Shares::new(self.pace.share()));
        for (at, (item, meaning)) in items.iter().zip(meanings).enumerate() {
            match meaning {
                Meaning::Event => match verdicts.remove(&item.message.id) {
                    None => self.match_event(item, &mut shares, &mut batch),
                    Some(NotAccepted::Refused(refusal)) => batch.reject(&item.message, refusal),
                    Some(NotAccepted::Unknown) => self.defer_unchecked(&item.message, &mut batch),
                },
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
            return batch.defer(NewDeferred { tenant, log_ref, matches: matching.len(), is_checked: true });
        }
        if matching.len() > NARROW {
            batch.wide += matching.len();
        }
        let started_at = Instant::now();
        add_messages(message, origin, matching.iter().map(|at| &interests[*at]), None, batch);
        shares.add_time(tenant, started_at.elapsed());
    }

    /// Defers an event that has to be checked.
    fn defer_unchecked(&mut self, message: &Message, batch: &mut Batch) {
        let (_, matching) = self.directory.matching(message);
        let (tenant, log_ref, matches) = (message.tenant.clone(), message.log_ref(), matching.len());
        batch.defer(NewDeferred { tenant, log_ref, matches, is_checked: false });
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
            events::store::retention_hold::extend(tx, from).await?;
        }
        let commanded: Vec<Uuid> = batch.commands.iter().map(|command| command.subscriber).collect();
        store::append(tx, after, &batch.messages, &commanded, now).await?;
        store::insert_commands(tx, &batch.commands).await?;
        store::insert_skipped(tx, &batch.skipped, now).await?;
        events::store::deferred::insert(tx, &batch.deferred).await?;
        events::store::rejected::insert(tx, &batch.rejected, now).await?;
        let streamed = std::mem::take(&mut batch.stream_messages);
        let streams = self.stream_sequences.append(tx, streamed, version.incarnation, now).await?;
        Ok((batch.into_fanned(after, version), streams))
    }

    /// Runs the turn of a replay or of a tenant with deferred events, alternately. None if nothing can be done now.
    async fn run_next_turn(&mut self, tx: &mut PgConnection) -> Result<Option<(Batch, DeferredTurn)>, ConsumerError> {
        let is_replays_turn = !self.last_turns.is_replays_turn;
        self.last_turns.is_replays_turn = is_replays_turn;
        if is_replays_turn && let Some((batch, turn)) = self.run_replay(tx).await? {
            return Ok(Some((batch, DeferredTurn::Replay(Box::new(turn)))));
        }
        if let Some((batch, turn)) = self.run_turn(tx).await? {
            return Ok(Some((batch, DeferredTurn::Tenant(turn))));
        }
        let replayed = if is_replays_turn { None } else { self.run_replay(tx).await? };
        Ok(replayed.map(|(batch, turn)| (batch, DeferredTurn::Replay(Box::new(turn)))))
    }

    /// Creates the hub messages of a batch in a transaction, and returns it.
    async fn fan_out(&mut self, context: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        self.uncommitted = None;
        // If this batch fails, for whatever reason, the next one has half its size.
        let previous_limit = std::mem::replace(&mut self.batch_limit, (items.len() as u32 / 2).max(1));
        let mut verdicts = self.checks.check(&self.events, items).await;
        let mut tx = context.db.begin().await?;
        let version = self.refresh(&mut tx).await?;
        let Some(mut batch) = self.collect(&mut tx, context, items, &mut verdicts).await? else {
            return Err(ConsumerError::BatchTooLarge);
        };
        // The share of its tenant bounds what an event with many matches leads to; smaller batches would not.
        let batch_limit = previous_limit.saturating_mul(2).min(limit_for(items.len(), batch.size - batch.wide));
        let (deferred, has_changed_replays) = (std::mem::take(&mut batch.deferred_tenants), batch.has_changed_replays);
        let (has_accepted_events, rejected) = (batch.has_accepted_events, batch.rejected.len());
        let (batch, streams) = self.write(&mut tx, batch, version).await?;
        self.uncommitted = Some(Uncommitted {
            batch,
            streams,
            batch_limit,
            deferred,
            has_changed_replays,
            has_accepted_events,
            rejected,
            turn: None,
        });
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
            (Some(backlog), Some(_)) if backlog.next(|tenant| self.checks.is_running(tenant)).is_none() => {
                Some(turn_at.max(Instant::now() + CHECK_PAUSE))
            }
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
        let rejected = batch.rejected.len();
        let ((batch, streams), batch_limit) = (self.write(&mut tx, batch, version).await?, self.batch_limit);
        self.uncommitted = Some(Uncommitted {
            batch,
            streams,
            batch_limit,
            deferred: HashSet::new(),
            has_changed_replays: false,
            has_accepted_events: false,
            rejected,
            turn: Some(turn),
        });
        Ok(Some(tx))
    }

    fn committed(&mut self) {
        let Some(uncommitted) = self.uncommitted.take() else { return };
        let Uncommitted { batch, streams, batch_limit, deferred, turn, .. } = uncommitted;
        metrics::counter!("pillarbox_hub_rejected_events_total").increment(uncommitted.rejected as u64);
        self.batch_limit = batch_limit;
        self.sequences.commit(batch.to);
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
        if uncommitted.has_changed_replays {
            self.replays = None;
        }
        if uncommitted.has_accepted_events {
            self.backlog = None;
        }
        if batch.to > batch.after {
            // If the channel is full, the dispatcher reads the messages from the database.
            let _ = self.handing_over.try_send(batch);
        }
    }

    fn reset(&mut self) {
        (self.directory, self.sequences, self.uncommitted) = (Directory::default(), LaneSequences::default(), None);
        (self.backlog, self.replays, self.stream_sequences) = (None, None, StreamSequences::default());
        self.checks.reset();
    }

    fn batch_limit(&self) -> u32 {
        self.batch_limit
    }
}

/// How many events lead to half of [`BATCH_MESSAGES_MAX`], if they match as many subscribers as these did.
fn limit_for(events: usize, messages: usize) -> u32 {
    u32::try_from(events * (BATCH_MESSAGES_MAX / 2) / messages.max(1)).unwrap_or(u32::MAX).max(1)
}
