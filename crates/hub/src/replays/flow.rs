//! Requesting, inspecting and controlling replays.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use http_kit::auth::Principal;
use pillarbox::consumers::{FollowerPosition, LogFollower};
use pillarbox::database::time;
use pillarbox::log::Tenant;
use pillarbox::log::{LogRef, Message, post};
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::deliveries::command::{CONTROL_SOURCE, CommandRequest, ReplayNotice, command_post};
use crate::directory::domain::Interest;
use crate::error::Error;
use crate::events::flow::{find_candidate, find_message};
use crate::events::selection::EventSelection;
use crate::events::view::message::MessageId;
use crate::replays::domain::{ReplayAction, ReplayKind, ReplayMode, ReplaySelection, ReplayState};
use crate::replays::fields::{BackfillFields, ReplayRequest};
use crate::replays::replay::{Replay, ReplayOutcomes, SelectedEvent};
use crate::replays::store;
use crate::replays::view::ReplayCount;
use crate::{FAN_OUT, Hub, directory};

/// Active replays of a tenant.
pub(crate) const ACTIVE_MAX: i64 = 10;
/// Limits of the rows that a dry run counts, and of the time that it takes. Beyond them it answers with a lower bound.
const COUNTED_ROWS_MAX: usize = 200_000;
const COUNTED_TIME_MAX: Duration = Duration::from_secs(3);
const COUNTED_ROWS: u32 = 2_000;
/// Limits the time in which a dry run matches events with subscribers, in slices between which it lets other requests run.
const MATCHING_TIME_MAX: Duration = Duration::from_millis(250);
const MATCHING_SLICE: Duration = Duration::from_millis(5);
/// Messages whose existence is checked at once.
const COUNTED_PAIRS: usize = 5_000;

/// Selects replays. None matches any.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReplayFilter {
    pub(crate) subscriber: Option<Uuid>,
    pub(crate) state: Option<ReplayState>,
}

/// Creates a replay. Fails if its subscriber or one of its events does not exist, or if the tenant has too many.
pub(crate) async fn create(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    request: ReplayRequest,
    by: Principal,
    now: DateTime<Utc>,
) -> Result<Replay, Error> {
    let replay = new_replay(tx, tenant, request, by.to_string(), now).await?;
    save_new(tx, tenant, &replay).await?;
    Ok(replay)
}

/// Creates a replay of one message. Fails if it does not exist.
pub(crate) async fn resend(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: MessageId,
    by: Principal,
    now: DateTime<Utc>,
) -> Result<Replay, Error> {
    let (event, _) = find_message(tx, tenant, id).await?;
    let mut replay =
        Replay::new(tenant.as_str(), ReplayKind::Replay, Some(id.subscriber), whole_log(), by.to_string(), now);
    replay.events = Some(vec![event.log_ref()]);
    save_new(tx, tenant, &replay).await?;
    Ok(replay)
}

async fn new_replay(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    request: ReplayRequest,
    by: String,
    now: DateTime<Utc>,
) -> Result<Replay, Error> {
    let ReplayRequest { subscriber, event_ids, selection, rate } = request;
    if let Some(subscriber) = subscriber
        && !directory::store::exists(tx, tenant, subscriber).await?
    {
        return Err(Error::NoSubscriber);
    }
    let mut replay = Replay::new(tenant.as_str(), ReplayKind::Replay, subscriber, selection, by, now);
    replay.rate = rate;
    if let Some(event_ids) = event_ids {
        let mut events = Vec::with_capacity(event_ids.len());
        for id in event_ids {
            let event = find_candidate(tx, tenant, id).await?.ok_or(Error::NoEvent)?;
            events.push(event.log_ref());
        }
        events.sort_unstable_by_key(|event: &LogRef| event.id);
        events.dedup();
        replay.events = Some(events);
    }
    Ok(replay)
}

/// Creates the backfill of a new subscriber, in the transaction that creates the subscriber.
pub(crate) async fn insert_backfill(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    subscriber: Uuid,
    fields: &BackfillFields,
    by: String,
    now: DateTime<Utc>,
) -> Result<Uuid, Error> {
    let selection = ReplaySelection { mode: ReplayMode::Missed, from: fields.from, ..whole_log() };
    let replay = Replay::new(tenant.as_str(), ReplayKind::Backfill, Some(subscriber), selection, by, now);
    save_new(tx, tenant, &replay).await?;
    Ok(replay.id)
}

fn whole_log() -> ReplaySelection {
    ReplaySelection {
        mode: ReplayMode::Resend,
        from: DateTime::UNIX_EPOCH,
        to: None,
        event_types: Vec::new(),
        filter: None,
    }
}

async fn save_new(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant, replay: &Replay) -> Result<(), Error> {
    if store::count_active(tx, tenant).await? >= ACTIVE_MAX {
        return Err(Error::TooManyReplays(ACTIVE_MAX));
    }
    store::insert(tx, replay).await?;
    notify_fan_out(tx, tenant, replay.id).await?;
    tracing::info!(replay = %replay.id, tenant = tenant.as_str(), by = replay.requested_by, "created a replay");
    Ok(())
}

/// Fan-out reads the log, so it learns of a change at once, in whichever process it runs.
async fn notify_fan_out(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant, replay: Uuid) -> Result<(), Error> {
    let notice = command_post(tenant, replay, &CommandRequest::ReplayChanged(ReplayNotice { replay }))?;
    post(tx, &CONTROL_SOURCE, &notice).await?;
    Ok(())
}

/// Returns replays newest first, those with ids below `before`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    filter: ReplayFilter,
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<(Replay, ReplayOutcomes)>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, tenant, filter.subscriber, filter.state, before, limit).await?)
}

/// Returns a replay.
pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<(Replay, ReplayOutcomes), Error> {
    store::find(&mut *hub.db.acquire().await?, tenant, id).await?.ok_or(Error::NoReplay)
}

/// Returns the names of the subscribers of these replays, as far as they exist.
pub(crate) async fn subscriber_names(
    hub: &Hub,
    replays: &[(Replay, ReplayOutcomes)],
) -> Result<HashMap<Uuid, String>, Error> {
    let ids: Vec<Uuid> = replays.iter().filter_map(|(replay, _)| replay.subscriber).collect();
    Ok(directory::store::names(&mut *hub.db.acquire().await?, &ids).await?)
}

/// Pauses, resumes or cancels a replay. A turn of fan-out that is under way ends first: afterwards no message is created.
/// Fails if the replay has ended.
pub(crate) async fn change(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: Uuid,
    action: ReplayAction,
    now: DateTime<Utc>,
) -> Result<(Replay, ReplayOutcomes), Error> {
    apply(tx, tenant, id, action, now).await?;
    store::find(tx, tenant, id).await?.ok_or(Error::NoReplay)
}

async fn apply(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: Uuid,
    action: ReplayAction,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let mut replay = store::lock(tx, tenant, id).await?.ok_or(Error::NoReplay)?;
    let status = &mut replay.status;
    let next =
        status.state.after(action, status.started_at.is_some()).ok_or(Error::ReplayEnded(status.state.as_str()))?;
    if next == status.state {
        return Ok(());
    }
    match action {
        ReplayAction::Pause => status.paused_at = Some(now),
        ReplayAction::Resume => {
            let paused = status.paused_at.take().map(|paused_at| now - paused_at).unwrap_or_default();
            status.timed_from = status.timed_from.map(|from| from + paused);
        }
        ReplayAction::Cancel => {}
    }
    status.state = next;
    if next.is_ended() {
        replay.end(next, now);
    }
    store::save(tx, &replay).await?;
    if next.is_ended() && replay.kind == ReplayKind::Backfill {
        // The subscriber gets the events that are posted from now on.
        store::end_backfill(tx, id).await?;
    }
    notify_fan_out(tx, tenant, id).await
}

/// Counts the messages that a replay would create, up to a bound. Fails like [`create`].
pub(crate) async fn dry_run(
    tx: &mut Transaction<'_, Postgres>,
    events: &EventSelection,
    tenant: &Tenant,
    request: ReplayRequest,
    now: DateTime<Utc>,
) -> Result<ReplayCount, Error> {
    let replay = new_replay(tx, tenant, request, String::new(), now).await?;
    let interests = directory::store::load_interests(tx, Some(tenant)).await?;
    let mut count = Count::new(&replay, events, &interests);
    if let Some(named) = &replay.events {
        let messages = pillarbox::log::load_messages(tx, named).await?;
        count.add(tx, &messages).await?;
        return Ok(count.result(true));
    }
    let Some(leader) = FollowerPosition::of_consumer(tx, FAN_OUT).await? else { return Ok(count.result(true)) };
    let first = FollowerPosition::since(tx, replay.selection.from, &leader).await?;
    let until_id = match replay.selection.to {
        Some(to) => FollowerPosition::first_id_after(tx, to).await?.unwrap_or(i64::MAX),
        None => i64::MAX,
    };
    let mut follower = LogFollower::new(events.fan_out().of_tenant(tenant.as_str()), first);
    let (mut rows, started_at) = (0, Instant::now());
    while !follower.has_reached(&leader) && follower.position().approximate_id() < until_id {
        if rows >= COUNTED_ROWS_MAX || started_at.elapsed() > COUNTED_TIME_MAX || count.is_over() {
            return Ok(count.result(false));
        }
        let (_, messages) = follower.read(tx, &leader, COUNTED_ROWS).await?;
        rows += COUNTED_ROWS as usize;
        count.add(tx, &messages).await?;
    }
    Ok(count.result(true))
}

/// The count of a dry run.
struct Count<'a> {
    replay: &'a Replay,
    events: &'a EventSelection,
    interests: &'a [Interest],
    matched: u64,
    /// Of the subscribers that match.
    matching_time: Duration,
    /// Some messages were not matched with all subscribers.
    is_cut: bool,
}

impl<'a> Count<'a> {
    fn new(replay: &'a Replay, events: &'a EventSelection, interests: &'a [Interest]) -> Count<'a> {
        Count { replay, events, interests, matched: 0, matching_time: Duration::ZERO, is_cut: false }
    }

    fn is_over(&self) -> bool {
        self.matching_time >= MATCHING_TIME_MAX
    }

    fn result(&self, is_complete: bool) -> ReplayCount {
        ReplayCount { matched: self.matched, is_exact: is_complete && !self.is_cut }
    }

    /// Counts the messages that these events lead to, until the time for matching is over.
    async fn add(&mut self, tx: &mut Transaction<'_, Postgres>, messages: &[Message]) -> Result<(), Error> {
        let Some(oldest) = messages.iter().map(|message| message.at).min() else { return Ok(()) };
        let (mut pairs, mut slice) = (Vec::new(), Instant::now());
        for message in messages {
            let checks_time = self.replay.events.is_none();
            let Some(event) = SelectedEvent::new(self.replay, self.events, message, checks_time) else { continue };
            for interest in self.interests {
                if slice.elapsed() >= MATCHING_SLICE {
                    self.matching_time += slice.elapsed();
                    tokio::task::yield_now().await;
                    slice = Instant::now();
                }
                if self.is_over() {
                    self.is_cut = true;
                    return self.count(tx, &mut pairs, oldest).await;
                }
                let has_type = interest.event_types.iter().any(|types| types.include(&message.topic));
                if has_type && event.is_for(interest) {
                    pairs.push((interest.subscriber, message.id));
                }
                if pairs.len() >= COUNTED_PAIRS {
                    self.count(tx, &mut pairs, oldest).await?;
                }
            }
        }
        self.matching_time += slice.elapsed();
        self.count(tx, &mut pairs, oldest).await
    }

    /// Counts these messages, and removes them from `pairs`.
    async fn count(
        &mut self,
        tx: &mut Transaction<'_, Postgres>,
        pairs: &mut Vec<(Uuid, i64)>,
        oldest: DateTime<Utc>,
    ) -> Result<(), Error> {
        let existing = match self.replay.selection.mode {
            ReplayMode::Missed => store::with_message(tx, pairs, oldest).await?,
            ReplayMode::Resend => Default::default(),
        };
        self.matched += pairs.drain(..).filter(|pair| !existing.contains(pair)).count() as u64;
        Ok(())
    }
}

/// Ends all active replays as failed. For a restored database, in which it is unknown what they have read.
pub async fn fail_all(tx: &mut PgConnection) -> sqlx::Result<u64> {
    let now = time::now(tx).await?;
    store::fail_all(tx, "the database was restored; request another replay", now).await
}
