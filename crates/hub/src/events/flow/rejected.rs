//! Events that were posted in SQL and rejected: listing and retrying them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use http_kit::page::PAGE_BYTES_MAX;
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use pillarbox::log::{LogRef, Message as Logged, load_up_to, post};
use pillarbox::operations::browse;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::Hub;
use crate::deliveries::command::{AcceptedNotice, CONTROL_SOURCE, CommandRequest, command_post};
use crate::deliveries::domain::EventOutcome;
use crate::error::Error;
use crate::event_types::cache::{Checked, Refusal};
use crate::events::flow::find_candidate;
use crate::events::store;
use crate::events::store::EventFilter;
use crate::events::store::rejected::Rejection;
use crate::events::store::retention_hold::OLD_REFERENCE_AGE;
use crate::events::view::{EventView, ListedEvent, RejectionView};

/// Events that one request retries at most.
pub(crate) const RETRIED_MAX: i64 = 100;
/// How long one request checks events.
const CHECKING_TIME_MAX: Duration = Duration::from_secs(1);

/// A rejected event that the catalogue accepts now, without its payload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acceptable {
    log_id: i64,
    message_id: Uuid,
}

impl From<&Logged> for Acceptable {
    fn from(event: &Logged) -> Acceptable {
        Acceptable { log_id: event.id, message_id: event.message_id }
    }
}

/// Returns rejected events, newest first, and where the next page starts.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    filter: &EventFilter,
    before: Option<i64>,
    limit: u32,
) -> Result<(Vec<ListedEvent>, Option<i64>), Error> {
    let mut db = hub.db.acquire().await?;
    let found = store::rejected::list(&mut db, tenant, filter, before, i64::from(limit)).await?;
    let next = found.last().filter(|_| found.len() == limit as usize).map(|last| last.log_ref.id);
    let refs: Vec<LogRef> = found.iter().map(|rejection| rejection.log_ref).collect();
    let names = browse::load_names(&mut db, &refs).await?;
    let mut keys: HashMap<i64, Option<String>> = names.into_iter().map(|name| (name.log_ref.id, name.key)).collect();
    let listed = |rejection: Rejection| {
        let key = keys.remove(&rejection.log_ref.id).flatten();
        ListedEvent {
            event: EventView::of_rejection(&rejection, key),
            outcome: EventOutcome::Rejected,
            rejection: Some(RejectionView::from(rejection)),
        }
    };
    Ok((found.into_iter().map(listed).collect(), next))
}

/// Checks a rejected event against the catalogue as it is now. Fails if it is refused again.
pub(crate) async fn check(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<Acceptable, Problem> {
    let event = find(hub, tenant, id).await?;
    match refusal(hub, tenant, &event).await? {
        Some(refusal) => Err(Error::StillRefused(refusal.errors).into()),
        None => Ok(Acceptable::from(&event)),
    }
}

async fn find(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<Logged, Error> {
    let mut db = hub.db.acquire().await?;
    let event = find_candidate(&mut db, tenant, id).await?.ok_or(Error::NoEvent)?;
    store::rejected::find(&mut db, tenant, event.id).await?.ok_or(Error::NotRejected)?;
    Ok(event)
}

/// The rejected events of one request, after their check.
#[derive(Debug, Default)]
pub(crate) struct CheckedEvents {
    pub(crate) acceptable: Vec<Acceptable>,
    /// The number of events that are still refused.
    pub(crate) refused: u64,
    /// Whether later rejected events remain.
    pub(crate) more: bool,
    /// Where the next request continues.
    pub(crate) next_after: Option<i64>,
}

/// Checks the rejected events of a type, oldest first, at most [`RETRIED_MAX`].
pub(crate) async fn check_many(
    hub: &Hub,
    tenant: &Tenant,
    event_type: &str,
    after: Option<i64>,
) -> Result<CheckedEvents, Problem> {
    let place = hub.limits.bulk_retries.enter().await;
    let _place = place.map_err(|exhausted| Problem::overloaded(exhausted, Duration::from_secs(1)))?;
    let (refs, events) = load(hub, tenant, event_type, after).await?;
    // In the order of the log, so that they keep their order in their lanes.
    let (mut checked, mut result) = (0, CheckedEvents::default());
    let started = Instant::now();
    for event in events {
        if checked > 0 && started.elapsed() > CHECKING_TIME_MAX {
            break;
        }
        if let Some(event) = event {
            match refusal(hub, tenant, &event).await {
                Ok(Some(_)) => result.refused += 1,
                Ok(None) => result.acceptable.push(Acceptable::from(&event)),
                Err(_) if checked > 0 => break,
                Err(problem) => return Err(problem),
            }
        }
        checked += 1;
    }
    result.more = checked < refs.len() || refs.len() as i64 == RETRIED_MAX;
    result.next_after = refs[..checked].last().filter(|_| result.more).map(|last| last.id);
    Ok(result)
}

async fn load(
    hub: &Hub,
    tenant: &Tenant,
    event_type: &str,
    after: Option<i64>,
) -> Result<(Vec<LogRef>, Vec<Option<Logged>>), Error> {
    let mut db = hub.db.acquire().await?;
    let refs = store::rejected::oldest(&mut db, tenant, event_type, after, RETRIED_MAX).await?;
    let events = load_up_to(&mut db, &refs, PAGE_BYTES_MAX).await?;
    Ok((refs, events))
}

/// Why the catalogue, as it is now, refuses an event. None: it accepts it.
async fn refusal(hub: &Hub, tenant: &Tenant, event: &Logged) -> Result<Option<Refusal>, Problem> {
    let checked = Checked { topic: &event.topic, payload: &event.payload };
    let checking = hub.catalogue.refusal(tenant, checked, None);
    Ok(hub.catalogue.within_verdict_time(checking).await?)
}

/// Defers events that were rejected, so that they are sent as if they were posted now. Returns how many; another request may have done it for some.
pub(crate) async fn accept(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    events: &[Acceptable],
    now: DateTime<Utc>,
) -> Result<u64, Error> {
    let Some(first) = events.first() else { return Ok(0) };
    let ids: Vec<i64> = events.iter().map(|event| event.log_id).collect();
    let accepted = store::rejected::accept(tx, tenant, &ids, now).await?;
    let Some(oldest) = accepted.iter().map(|log_ref| log_ref.at).min() else { return Ok(0) };
    store::deferred::insert_accepted(tx, tenant.as_str(), &accepted, now).await?;
    // Fan-out then reads all deferred events of the tenants again.
    let notice = CommandRequest::EventAccepted(AcceptedNotice { event: first.message_id });
    post(tx, &CONTROL_SOURCE, &command_post(tenant, first.message_id, &notice)?).await?;
    // The last statement: fan-out also waits for it.
    if oldest < now - OLD_REFERENCE_AGE {
        store::retention_hold::extend(tx, oldest).await?;
    }
    Ok(accepted.len() as u64)
}
