//! Requesting, inspecting and controlling replays.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use http::StatusCode;
use kit::auth::{Principal, Tenant};
use kit::idempotency::{RequestIdentity, StoredResponse};
use kit::problem::Problem;
use mailbox::consumers::{FollowerPosition, LogFollower};
use mailbox::idempotency::StoreResponse;
use mailbox::log::{LogRef, Message, post};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::event::{find_candidate, find_message};
use super::{command_post, run_once};
use crate::domain::{Interest, ReplayAction, ReplayKind, ReplayMode, ReplaySelection, ReplayState};
use crate::error::Error;
use crate::event_selection::EventSelection;
use crate::operator_command::{CONTROL_SOURCE, CommandRequest, ReplayNotice};
use crate::replay::{Replay, ReplayOutcomes, targets};
use crate::replay_fields::{BackfillFields, ReplayRequest};
use crate::store::{replay as store, subscriber};
use crate::view::{MessageId, ReplayCount, ReplayView};
use crate::{FAN_OUT, Hub};

/// Active replays of a tenant.
pub(crate) const ACTIVE_MAX: i64 = 10;
/// A dry run counts at most so many rows of the log, for at most so long. With more it answers with a lower bound.
const COUNTED_ROWS_MAX: usize = 200_000;
const COUNTED_TIME_MAX: Duration = Duration::from_secs(3);
const COUNTED_ROWS: u32 = 2_000;

/// Selects replays. None matches any.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReplayFilter {
    pub(crate) subscriber: Option<Uuid>,
    pub(crate) state: Option<ReplayState>,
}

/// Creates a replay. Fails if its subscriber or one of its events does not exist, or if the tenant has too many.
pub(crate) async fn create(
    hub: &Arc<Hub>,
    tenant: Tenant,
    request: ReplayRequest,
    by: Principal,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            let replay = insert(tx, &tenant, request, by.to_string(), now).await?;
            Ok(accepted(replay, now))
        })
    })
    .await
}

/// Creates a replay of one message. Fails if it does not exist.
pub(crate) async fn resend(
    hub: &Arc<Hub>,
    tenant: Tenant,
    id: MessageId,
    by: Principal,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            let (event, _) = find_message(tx, &tenant, id).await?;
            let of_subscriber = (ReplayKind::Replay, Some(id.subscriber));
            let mut replay = Replay::new(tenant.as_str(), of_subscriber, whole_log(), by.to_string(), now);
            replay.events = Some(vec![event.log_ref()]);
            save_new(tx, &tenant, &replay).await?;
            Ok(accepted(replay, now))
        })
    })
    .await
}

fn accepted(replay: Replay, now: DateTime<Utc>) -> StoredResponse {
    StoredResponse::json(StatusCode::ACCEPTED, &ReplayView::new((replay, ReplayOutcomes::default()), now))
}

/// The same in the caller's transaction. Returns the replay.
pub(crate) async fn insert(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    request: ReplayRequest,
    by: String,
    now: DateTime<Utc>,
) -> Result<Replay, Error> {
    let replay = new_replay(tx, tenant, request, by, now).await?;
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
        && !subscriber::exists(tx, tenant, subscriber).await?
    {
        return Err(Error::NoSubscriber);
    }
    let mut replay = Replay::new(tenant.as_str(), (ReplayKind::Replay, subscriber), selection, by, now);
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
    (subscriber, fields): (Uuid, &BackfillFields),
    by: String,
    now: DateTime<Utc>,
) -> Result<Uuid, Error> {
    let selection = ReplaySelection { mode: ReplayMode::Missed, from: fields.from, ..whole_log() };
    let replay = Replay::new(tenant.as_str(), (ReplayKind::Backfill, Some(subscriber)), selection, by, now);
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
    page: (Option<Uuid>, u32),
) -> Result<Vec<(Replay, ReplayOutcomes)>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, tenant, (filter.subscriber, filter.state), page).await?)
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
    Ok(subscriber::names(&mut *hub.db.acquire().await?, &ids).await?)
}

/// Pauses, resumes or cancels a replay. A turn of fan-out that is under way ends first: afterwards no message is created.
/// Fails if the replay has ended.
pub(crate) async fn change(
    hub: &Arc<Hub>,
    (tenant, id): (Tenant, Uuid),
    action: ReplayAction,
    by: Principal,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    run_once(hub, identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            change_in(tx, &tenant, id, action, now).await?;
            tracing::info!(replay = %id, ?action, %by, "changed a replay");
            let found = store::find(tx, &tenant, id).await.map_err(Error::from)?.ok_or(Error::NoReplay)?;
            Ok(StoredResponse::json(StatusCode::OK, &ReplayView::new(found, now)))
        })
    })
    .await
}

/// The same in the caller's transaction.
pub(crate) async fn change_in(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: Uuid,
    action: ReplayAction,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let mut replay = store::lock(tx, tenant, id).await?.ok_or(Error::NoReplay)?;
    let status = &mut replay.status;
    let next = status.state.after(action, status.started_at.is_some()).ok_or(Error::ReplayEnded(status.state))?;
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
    let interests = subscriber::load_interests(tx).await?;
    let interests: Vec<Interest> = interests.into_iter().filter(|interest| interest.tenant == *tenant).collect();
    let mut count = ReplayCount { matched: 0, is_exact: true };
    if let Some(named) = &replay.events {
        let messages = mailbox::log::load_messages(tx, named).await?;
        count.matched = count_messages(tx, &replay, events, &interests, &messages).await?;
        return Ok(count);
    }
    let Some(leader) = FollowerPosition::of_consumer(tx, FAN_OUT).await? else { return Ok(count) };
    let first = FollowerPosition::since(tx, replay.selection.from, &leader).await?;
    let until_id = match replay.selection.to {
        Some(to) => FollowerPosition::first_id_after(tx, to).await?.unwrap_or(i64::MAX),
        None => i64::MAX,
    };
    let mut follower = LogFollower::new(events.fan_out().of_tenant(tenant.as_str()), first);
    let (mut rows, started_at) = (0, Instant::now());
    while !follower.has_reached(&leader) && follower.position().approximate_id() < until_id {
        if rows >= COUNTED_ROWS_MAX || started_at.elapsed() > COUNTED_TIME_MAX {
            count.is_exact = false;
            break;
        }
        let (_, messages) = follower.read(tx, &leader, COUNTED_ROWS).await?;
        rows += COUNTED_ROWS as usize;
        count.matched += count_messages(tx, &replay, events, &interests, &messages).await?;
    }
    Ok(count)
}

async fn count_messages(
    tx: &mut Transaction<'_, Postgres>,
    replay: &Replay,
    events: &EventSelection,
    interests: &[Interest],
    messages: &[Message],
) -> Result<u64, Error> {
    let mut pairs = Vec::new();
    for message in messages {
        let has_type = |interest: &&Interest| interest.event_types.iter().any(|types| types.include(&message.topic));
        let found = targets(replay, events, message, replay.events.is_none(), interests.iter().filter(has_type));
        pairs.extend(found.into_iter().map(|(subscriber, _)| (subscriber, message.id)));
    }
    let oldest = messages.iter().map(|message| message.at).min();
    if let (ReplayMode::Missed, Some(oldest)) = (replay.selection.mode, oldest) {
        let existing = store::with_message(tx, &pairs, oldest).await?;
        pairs.retain(|pair| !existing.contains(pair));
    }
    Ok(pairs.len() as u64)
}
