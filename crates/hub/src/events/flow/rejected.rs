//! Events that were posted in SQL and rejected: listing and retrying them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::page::PAGE_BYTES_MAX;
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use pillarbox::log::{LogRef, Message as Logged, load_up_to, post};
use pillarbox::operations::browse;
use serde::Serialize;
use service::idempotency::{StoreResponse, find_response};
use sqlx::{Postgres, Transaction};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::Hub;
use crate::deliveries::command::{AcceptedNotice, CONTROL_SOURCE, CommandRequest, command_post};
use crate::deliveries::domain::EventOutcome;
use crate::error::Error;
use crate::event_types::cache::{Checked, Refusal};
use crate::events::flow::{EventFilter, find_candidate};
use crate::events::store;
use crate::events::store::rejected::Rejection;
use crate::events::store::retention_hold::OLD_REFERENCE_AGE;
use crate::events::view::{EventView, ListedEvent, RejectionView};

/// Events that one request retries at most.
pub(crate) const RETRIED_MAX: i64 = 100;
/// How long one request checks events.
const CHECKING_TIME_MAX: Duration = Duration::from_secs(1);

/// A rejected event that the catalogue accepts now, without its payload.
#[derive(Debug, Clone, Copy)]
struct Retried {
    log_id: i64,
    message_id: Uuid,
}

impl From<&Logged> for Retried {
    fn from(event: &Logged) -> Retried {
        Retried { log_id: event.id, message_id: event.message_id }
    }
}

/// The result of retrying many rejected events.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = RetriedEvents)]
pub(crate) struct RetriedEvents {
    /// The number of events that are accepted now and are sent.
    retried: u64,
    /// The number of events that are still refused; each shows why.
    refused: u64,
    /// Whether later rejected events remain: repeat the request with `next_after` as `after`.
    more: bool,
    /// Where the next request continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_after: Option<i64>,
}

/// Returns rejected events, newest first, and where the next page starts.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    filter: &EventFilter,
    (before, limit): (Option<i64>, u32),
) -> Result<(Vec<ListedEvent>, Option<i64>), Error> {
    let mut db = hub.db.acquire().await?;
    let selected = (filter.event_type.as_deref(), filter.from, filter.to);
    let found = store::rejected::list(&mut db, tenant, selected, (before, i64::from(limit))).await?;
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

/// Checks a rejected event against the catalogue as it is now. If it is accepted, it is sent as if it was posted now.
pub(crate) async fn retry(
    hub: &Arc<Hub>,
    tenant: Tenant,
    id: Uuid,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    if let Some(repeated) = find_response(&hub.db, identity).await? {
        return Ok(repeated);
    }
    let event = {
        let mut db = hub.db.acquire().await.map_err(Error::from)?;
        let event = find_candidate(&mut db, &tenant, id).await?.ok_or(Error::NoEvent)?;
        store::rejected::find(&mut db, &tenant, event.id).await.map_err(Error::from)?.ok_or(Error::NotRejected)?;
        event
    };
    if let Some(refusal) = refusal(hub, &tenant, &event).await? {
        return Err(Error::StillRefused(refusal.errors).into());
    }
    let retried = Retried::from(&event);
    hub.run_once(identity, StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            if accept(tx, &hub, &tenant, &[retried]).await? == 0 {
                return Err(Error::NotRejected.into());
            }
            Ok(StoredResponse::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}

/// Retries the rejected events of a type, oldest first, at most [`RETRIED_MAX`].
pub(crate) async fn retry_many(
    hub: &Arc<Hub>,
    tenant: Tenant,
    (event_type, after): (String, Option<i64>),
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    if let Some(repeated) = find_response(&hub.db, identity).await? {
        return Ok(repeated);
    }
    let place = hub.limits.bulk_retries.enter().await;
    let _place = place.map_err(|exhausted| Problem::overloaded(exhausted, Duration::from_secs(1)))?;
    let (refs, events) = {
        let mut db = hub.db.acquire().await.map_err(Error::from)?;
        let refs =
            store::rejected::oldest(&mut db, &tenant, &event_type, (after, RETRIED_MAX)).await.map_err(Error::from)?;
        let events = load_up_to(&mut db, &refs, PAGE_BYTES_MAX).await.map_err(Error::from)?;
        (refs, events)
    };
    // In the order of the log, so that they keep their order in their lanes.
    let (mut accepted, mut checked, mut result) = (Vec::new(), 0, RetriedEvents::default());
    let started = Instant::now();
    for event in events {
        if checked > 0 && started.elapsed() > CHECKING_TIME_MAX {
            break;
        }
        if let Some(event) = event {
            match refusal(hub, &tenant, &event).await {
                Ok(Some(_)) => result.refused += 1,
                Ok(None) => accepted.push(Retried::from(&event)),
                Err(_) if checked > 0 => break,
                Err(problem) => return Err(problem),
            }
        }
        checked += 1;
    }
    result.more = checked < refs.len() || refs.len() as i64 == RETRIED_MAX;
    result.next_after = refs[..checked].last().filter(|_| result.more).map(|last| last.id);
    hub.run_once(identity, StoreResponse::WithBody, |tx, hub| {
        Box::pin(async move {
            result.retried = accept(tx, &hub, &tenant, &accepted).await?;
            Ok(StoredResponse::json(StatusCode::OK, &result))
        })
    })
    .await
}

/// Why the catalogue, as it is now, refuses an event. None: it accepts it.
async fn refusal(hub: &Hub, tenant: &Tenant, event: &Logged) -> Result<Option<Refusal>, Problem> {
    let checked = Checked { topic: &event.topic, payload: &event.payload };
    let checking = hub.catalogue.refusal(tenant, checked, None);
    Ok(hub.catalogue.within_verdict_time(checking).await?)
}

/// Defers events that were rejected, so that they are sent. Returns how many; another request may have done it for some.
async fn accept(
    tx: &mut Transaction<'_, Postgres>,
    hub: &Hub,
    tenant: &Tenant,
    events: &[Retried],
) -> Result<u64, Error> {
    let Some(first) = events.first() else { return Ok(0) };
    let now = hub.clock.now();
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
