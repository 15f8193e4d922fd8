//! The turns in which fan-out advances replays.
//!
//! Only fan-out appends hub messages, so it also creates those of replays: a part in each turn, in the transaction that saves
//! how far the replay has come. A replay never reads what fan-out has not read. In each part the events have the order of
//! the log across all shards, because a lane can span them.
//!
//! A replay has separate lanes and creates messages only while few of them wait at a subscriber. A backfill creates the
//! messages of a new subscriber, for which fan-out itself creates none until then; when it has read everything that fan-out
//! has read, it ends, and in the same transaction the subscriber becomes live.

mod queue;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use chrono::{DateTime, Utc};
use pillarbox::consumers::{ConsumerError, FollowerPosition, LogFollower};
use pillarbox::log::{LogRef, Message, load_messages};
use serde_json::Value;
use sqlx::PgConnection;
use uuid::Uuid;

pub(super) use self::queue::{ReplayTurn, Replays};

use self::queue::ActiveReplay;
use super::FanOut;
use super::batch::Batch;
use super::shares::MATCHING_TIME_MAX;
use crate::deliveries::message::{HubEvent, replay_lane};
use crate::events::sql_events::SQL_SOURCE;
use crate::replays::domain::{ReplayKind, ReplayMode, ReplayState};
use crate::replays::replay::{Replay, ReplayProgress, SelectedEvent};
use crate::{FAN_OUT, events, replays};

/// Rows that a turn reads at least, and at most.
const ROWS_MIN: u32 = 128;
const ROWS_MAX: u32 = 2_000;
/// Rows that the turn of a backfill reads beyond the history: at least as many as fan-out reads in the same time, so that the backfill
/// catches up.
const FOLLOWING_ROWS: u32 = 5_000;
/// Named events that a turn reads.
const NAMED_EVENTS_MAX: usize = 100;

/// The messages that a turn has read.
struct Part {
    messages: Vec<Message>,
    /// Where the messages were read from; None for named events.
    read_from: Option<FollowerPosition>,
    /// It is the last one.
    is_last: bool,
    checks_time: bool,
    left_out: LeftOut,
}

/// Events that were posted in SQL and that a replay does not send.
#[derive(Debug, Default)]
struct LeftOut {
    /// They are rejected; or a backfill leaves them to their retry.
    rejected: HashSet<i64>,
    /// They are not checked yet, so the replay waits before them.
    unchecked: HashSet<i64>,
}

/// A message to create.
struct Candidate {
    /// The index of the event in the part.
    at: usize,
    subscriber: Uuid,
    lane: Option<String>,
}

/// Where a turn ends before the end of its part.
struct Cut {
    /// The index of the first event that is not done.
    at: usize,
    /// The subscribers of this event up to this one are done.
    after: Option<Uuid>,
    /// The subscriber that has too many messages.
    waits_for: Option<Uuid>,
}

impl FanOut {
    /// Creates the next messages of the replay whose turn it is. None if no replay can continue now.
    pub(super) async fn run_replay(
        &mut self,
        tx: &mut PgConnection,
    ) -> Result<Option<(Batch, ReplayTurn)>, ConsumerError> {
        let started_at = Instant::now();
        let due = self.replays.as_mut().and_then(|replays| replays.pop_due(started_at));
        let Some(mut active) = due else { return Ok(None) };
        self.last_turns.replay = Some(active.id);
        // It was paused, it has ended, or it was deleted: when it is resumed, the replays are loaded again.
        let Some(mut replay) = replays::store::lock_runnable(tx, active.id).await? else { return Ok(None) };
        let share = self.pace.begin_turn().min(active.allowance(replay.rate, started_at));
        let leader = FollowerPosition::of_consumer(tx, FAN_OUT).await?;
        let before = saved_progress(&replay);
        let turn = match leader.filter(|_| share > 0) {
            Some(leader) => self.advance(tx, &mut active, &mut replay, &leader, share).await?,
            None => None,
        };
        let has_advanced = before != saved_progress(&replay);
        let Some(batch) = turn.filter(|batch| !batch.messages.is_empty() || has_advanced) else {
            self.pace.cancel_turn();
            match share {
                0 => active.wait_for_rate(replay.rate, Instant::now()),
                _ => active.wait_longer(Instant::now()),
            }
            self.replays.get_or_insert_default().put_back(active);
            return Ok(None);
        };
        replays::store::save(tx, &replay).await?;
        let is_ended = replay.status.state.is_ended();
        if is_ended && replay.kind == ReplayKind::Backfill {
            replays::store::end_backfill(tx, replay.id).await?;
        }
        let created = batch.messages.len();
        active.schedule(&replay, created, Instant::now());
        Ok(Some((batch, ReplayTurn { replay: active, is_ended, created, started_at })))
    }

    /// Adds the next messages, at most `share`, and advances the replay. None if it cannot be continued now.
    async fn advance(
        &mut self,
        tx: &mut PgConnection,
        active: &mut ActiveReplay,
        replay: &mut Replay,
        leader: &FollowerPosition,
        share: usize,
    ) -> Result<Option<Batch>, ConsumerError> {
        let now = self.clock.now();
        if replay.status.started_at.is_none() {
            start(tx, replay, leader, now).await?;
        }
        let share = match replay.subscriber.map(|subscriber| (subscriber, self.directory.is_active(subscriber))) {
            Some((subscriber, None)) => {
                // It may have been created, with its backfill, after this transaction has read the directory.
                if replays::store::subscriber_exists(tx, subscriber).await? {
                    return Ok(None);
                }
                replay.status.error = Some(format!("subscriber {subscriber} was deleted"));
                replay.end(ReplayState::Failed, now);
                return Ok(Some(Batch::default()));
            }
            // No messages are created for a subscriber that is switched off: the replay would pass its events over.
            Some((_, Some(false))) => 0,
            Some((subscriber, Some(true))) => share.min(free_capacity(tx, replay, subscriber, now).await?),
            None => share,
        };
        if share == 0 {
            replay.progress.waits_for = replay.subscriber;
            return Ok(Some(Batch::default()));
        }
        let part = self.read_part(tx, active, replay, leader, share).await?;
        let (mut candidates, mut cut) = self.candidates(replay, &part, share);
        if replay.selection.mode == ReplayMode::Missed && replay.kind == ReplayKind::Replay {
            drop_existing(tx, &part.messages, &mut candidates).await?;
        }
        if let Some(earlier) = limit_waiting(tx, replay, &part.messages, &candidates, now).await? {
            candidates.truncate(earlier.0);
            cut = Some(earlier.1);
        }
        active.adapt_rows(candidates.len(), share, cut.is_some());
        let batch = self.create(tx, replay, &part.messages, candidates).await?;
        advance_to(active, replay, &part, cut.as_ref(), now);
        Ok(Some(batch))
    }

    async fn read_part(
        &self,
        tx: &mut PgConnection,
        active: &mut ActiveReplay,
        replay: &Replay,
        leader: &FollowerPosition,
        share: usize,
    ) -> Result<Part, ConsumerError> {
        if let Some(events) = &replay.events {
            let rest = &events[replay.progress.events_done.min(events.len())..];
            let part = &rest[..rest.len().min(NAMED_EVENTS_MAX)];
            let mut messages = load_messages(tx, part).await?;
            messages.sort_unstable_by_key(|message| message.id);
            let is_last = part.len() == rest.len();
            let left_out = left_out(tx, replay, &messages).await?;
            return Ok(Part { messages, read_from: None, is_last, checks_time: false, left_out });
        }
        let filter = self.events.fan_out().of_tenant(&replay.tenant);
        let follower = match &mut active.follower {
            Some(follower) => follower,
            none => {
                let read_to = replay.progress.read_to.clone().unwrap_or_default();
                none.insert(LogFollower::new(filter, FollowerPosition::from_json(tx, read_to).await?))
            }
        };
        let until = match (&replay.progress.read_until, replay.kind) {
            (Some(until), ReplayKind::Replay) => FollowerPosition::from_json(tx, until.clone()).await?,
            (Some(_) | None, _) => leader.clone(),
        };
        let is_history = follower.position().is_history();
        let limit = if is_history || replay.kind == ReplayKind::Replay {
            (share as u32 * active.rows_per_message).clamp(ROWS_MIN, ROWS_MAX)
        } else {
            FOLLOWING_ROWS
        };
        let (read_from, mut messages) = follower.read(tx, &until, limit).await?;
        let mut is_last = follower.has_reached(&until);
        if let Some(until_id) = replay.progress.until_id {
            messages.retain(|message| message.id < until_id);
            is_last |= follower.position().approximate_id() >= until_id;
        }
        let checks_time = read_from.is_history() || replay.kind == ReplayKind::Replay;
        let left_out = left_out(tx, replay, &messages).await?;
        Ok(Part { messages, read_from: Some(read_from), is_last, checks_time, left_out })
    }

    /// The messages to create for the events of this part, at most `share`, and where the rest begins. The rest also begins
    /// when the time for matching is over: most subscribers may match nothing, and a filter may be expensive.
    fn candidates(&mut self, replay: &Replay, part: &Part, share: usize) -> (Vec<Candidate>, Option<Cut>) {
        let (mut candidates, end) = (Vec::new(), Instant::now() + MATCHING_TIME_MAX);
        for (at, message) in part.messages.iter().enumerate() {
            let mut after = replay.progress.after.filter(|_| at == 0);
            if part.left_out.unchecked.contains(&message.id) {
                return (candidates, Some(Cut { at, after, waits_for: None }));
            }
            if part.left_out.rejected.contains(&message.id) {
                continue;
            }
            // Each turn matches something.
            if at > 0 && Instant::now() >= end {
                return (candidates, Some(Cut { at, after, waits_for: None }));
            }
            let Some(event) = SelectedEvent::new(replay, &self.events, message, part.checks_time) else { continue };
            let (interests, matching) = self.directory.matching(message);
            // The directory has the order of the subscribers' ids.
            let begins_after = |id: Uuid| matching.partition_point(|at| interests[*at].subscriber <= id);
            let first = after.map_or(0, begins_after);
            let range = match replay.subscriber.map(begins_after) {
                Some(end) => first.max(end.saturating_sub(1))..end,
                None => first..matching.len(),
            };
            for (checked, index) in matching.get(range).unwrap_or_default().iter().enumerate() {
                let interest = &interests[*index];
                let is_over = candidates.len() == share || (checked > 0 && Instant::now() >= end);
                if is_over {
                    return (candidates, Some(Cut { at, after, waits_for: None }));
                }
                if event.is_for(interest) {
                    candidates.push(Candidate { at, subscriber: interest.subscriber, lane: event.lane(interest) });
                }
                after = Some(interest.subscriber);
            }
        }
        (candidates, None)
    }

    async fn create(
        &mut self,
        tx: &mut PgConnection,
        replay: &mut Replay,
        messages: &[Message],
        candidates: Vec<Candidate>,
    ) -> Result<Batch, ConsumerError> {
        let (mut batch, mut created) = (Batch::default(), BTreeMap::<Uuid, i64>::new());
        let mut event: Option<(usize, Arc<HubEvent>)> = None;
        for Candidate { at, subscriber, lane } in candidates {
            let message = &messages[at];
            let content = match &event {
                Some((of, content)) if *of == at => content.clone(),
                Some(_) | None => Arc::new(HubEvent::from_log(message)),
            };
            event = Some((at, content.clone()));
            let lane = match replay.kind {
                ReplayKind::Replay => lane.map(|lane| replay_lane(replay.id, &lane)),
                ReplayKind::Backfill => lane,
            };
            batch.add_replayed(replay.id, subscriber, lane, message.log_ref(), content);
            *created.entry(subscriber).or_default() += 1;
        }
        replay.progress.matched += batch.messages.len() as i64;
        replay.progress.created += batch.messages.len() as i64;
        replays::store::add_created(tx, replay.id, &created.into_iter().collect::<Vec<_>>()).await?;
        Ok(batch)
    }
}

/// The events of a part that the replay does not send.
async fn left_out(tx: &mut PgConnection, replay: &Replay, messages: &[Message]) -> sqlx::Result<LeftOut> {
    let is_sql = |message: &&Message| message.source == SQL_SOURCE.as_str();
    let ids: Vec<i64> = messages.iter().filter(is_sql).map(|message| message.id).collect();
    let is_rejected = |accepted_at: &Option<DateTime<Utc>>| match (accepted_at, replay.kind) {
        (None, _) => true,
        (Some(accepted_at), ReplayKind::Backfill) => *accepted_at >= replay.created_at,
        (Some(_), ReplayKind::Replay) => false,
    };
    let rejected = events::store::rejected::among(tx, &ids).await?;
    let rejected = rejected.into_iter().filter(|(_, accepted_at)| is_rejected(accepted_at)).map(|(id, _)| id).collect();
    let unchecked =
        events::store::deferred::unchecked_among(tx, replay.tenant.as_str(), &ids).await?.into_iter().collect();
    Ok(LeftOut { rejected, unchecked })
}

/// How many messages of replays have room at a subscriber; 0 unless a quarter of the room is free, so that each turn creates
/// many.
async fn free_capacity(
    tx: &mut PgConnection,
    replay: &Replay,
    subscriber: Uuid,
    now: DateTime<Utc>,
) -> sqlx::Result<usize> {
    let waiting =
        replays::store::waiting(tx, &replay.tenant, &[subscriber], now).await?.remove(&subscriber).unwrap_or_default();
    let waiting_max = replay.waiting_max(0);
    let room = waiting_max - waiting;
    Ok(if room > waiting_max / 4 { room as usize } else { 0 })
}

/// Tells whether a turn has changed anything.
fn saved_progress(replay: &Replay) -> (Option<Value>, Option<Uuid>, Option<Uuid>, usize, ReplayState) {
    let ReplayProgress { read_to, after, waits_for, events_done, .. } = &replay.progress;
    (read_to.clone(), *after, *waits_for, *events_done, replay.status.state)
}

/// Determines what the replay reads.
async fn start(
    tx: &mut PgConnection,
    replay: &mut Replay,
    leader: &FollowerPosition,
    now: DateTime<Utc>,
) -> Result<(), ConsumerError> {
    (replay.status.state, replay.status.started_at) = (ReplayState::Running, Some(now));
    replay.status.timed_from = Some(now);
    if replay.events.is_some() {
        return Ok(());
    }
    let first = FollowerPosition::since(tx, replay.selection.from, leader).await?;
    let progress = &mut replay.progress;
    progress.until_id = match replay.selection.to {
        Some(to) => FollowerPosition::first_id_after(tx, to).await?,
        None => None,
    };
    (progress.first_id, progress.position_id) = (Some(first.approximate_id()), Some(first.approximate_id()));
    progress.last_id = progress.until_id.or(Some(leader.approximate_id()));
    (progress.read_to, progress.read_until) = (Some(first.to_json()), Some(leader.to_json()));
    Ok(())
}

/// Drops the candidates whose subscriber has a message of the event.
async fn drop_existing(
    tx: &mut PgConnection,
    messages: &[Message],
    candidates: &mut Vec<Candidate>,
) -> sqlx::Result<()> {
    let Some(oldest) = messages.iter().map(|message| message.at).min() else { return Ok(()) };
    let pair = |candidate: &Candidate| (candidate.subscriber, messages[candidate.at].id);
    let pairs: Vec<(Uuid, i64)> = candidates.iter().map(pair).collect();
    let existing = replays::store::with_message(tx, &pairs, oldest).await?;
    candidates.retain(|candidate| !existing.contains(&pair(candidate)));
    Ok(())
}

/// Returns how many candidates can be created, and where the rest begins, if too many messages wait at a subscriber.
async fn limit_waiting(
    tx: &mut PgConnection,
    replay: &Replay,
    messages: &[Message],
    candidates: &[Candidate],
    now: DateTime<Utc>,
) -> sqlx::Result<Option<(usize, Cut)>> {
    if candidates.is_empty() {
        return Ok(None);
    }
    let mut subscribers: Vec<Uuid> = candidates.iter().map(|candidate| candidate.subscriber).collect();
    subscribers.sort_unstable();
    subscribers.dedup();
    let mut waiting = replays::store::waiting(tx, &replay.tenant, &subscribers, now).await?;
    let bytes: usize = messages.iter().map(|message| message.payload.get().len()).sum();
    let waiting_max = replay.waiting_max(bytes / messages.len().max(1));
    for (index, Candidate { at, subscriber, .. }) in candidates.iter().enumerate() {
        let count = waiting.entry(*subscriber).or_default();
        if *count >= waiting_max {
            let previous = index.checked_sub(1).map(|previous| &candidates[previous]);
            let after = match previous.filter(|previous| previous.at == *at) {
                Some(previous) => Some(previous.subscriber),
                None => replay.progress.after.filter(|_| *at == 0),
            };
            return Ok(Some((index, Cut { at: *at, after, waits_for: Some(*subscriber) })));
        }
        *count += 1;
    }
    Ok(None)
}

/// Advances the replay past what is done.
fn advance_to(active: &mut ActiveReplay, replay: &mut Replay, part: &Part, cut: Option<&Cut>, now: DateTime<Utc>) {
    let progress = &mut replay.progress;
    (progress.after, progress.waits_for) = (cut.and_then(|cut| cut.after), cut.and_then(|cut| cut.waits_for));
    let last_done = match cut {
        Some(cut) => cut.at.checked_sub(1).map(|last| &part.messages[last]),
        None => part.messages.last(),
    };
    progress.position_at = last_done.map(|message| message.at).or(progress.position_at);
    let next_id = cut.map(|cut| part.messages[cut.at].id);
    if let Some(events) = &replay.events {
        let is_done = |event: &&LogRef| next_id.is_none_or(|next| event.id < next);
        let read = events.iter().skip(progress.events_done).take(NAMED_EVENTS_MAX);
        progress.events_done += read.take_while(is_done).count();
    } else if let (Some(follower), Some(read_from)) = (&mut active.follower, &part.read_from) {
        if let Some(next_id) = next_id {
            follower.return_to(read_from, next_id);
        }
        progress.position_id = Some(follower.position().approximate_id());
        progress.read_to = Some(follower.position().to_json());
    }
    if cut.is_none() && part.is_last {
        replay.end(ReplayState::Finished, now);
    }
}
