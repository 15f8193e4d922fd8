//! Listing, retrying and discarding dead letters.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use http::StatusCode;
use http_kit::auth::Principal;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use pillarbox::log::post_all;
use serde::Serialize;
use service::idempotency::StoreResponse;
use sqlx::{Postgres, Transaction};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::dead_letters::store;
use crate::dead_letters::store::{DeadLetter, DeadLetterFilter, DeadLetterWithSnapshots, Discarded, Retryable};
use crate::deliveries::command::{CONTROL_SOURCE, CommandRequest, DeadLetterRequest, RetryRequest, command_post};
use crate::error::Error;
use crate::{Hub, directory};

/// Dead letters that one transaction retries or discards.
const STEP: i64 = 1_000;
/// Dead letters that one request retries or discards at most.
pub(crate) const CHANGED_MAX: u64 = 100_000;

/// The result of retrying many dead letters.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RetriedDeadLetters)]
pub(crate) struct Retried {
    /// The number of dead letters that are sent again.
    retried: u64,
    /// Whether matching dead letters remain: repeat the request.
    more: bool,
}

/// The result of discarding many dead letters.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DiscardedDeadLetters)]
pub(crate) struct DiscardedMany {
    /// The number of dead letters that were discarded.
    discarded: u64,
    /// Whether matching dead letters remain: repeat the request.
    more: bool,
}

/// Returns dead letters newest first, those with ids below `before`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    filter: &DeadLetterFilter,
    (before, limit): (Option<Uuid>, u32),
) -> Result<Vec<DeadLetter>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, tenant, filter, (before, limit)).await?)
}

/// Returns a dead letter with the snapshots of its event and subscriber.
pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<DeadLetterWithSnapshots, Error> {
    store::find(&mut *hub.db.acquire().await?, tenant, id).await?.ok_or(Error::NoDeadLetter)
}

/// Commands fan-out to send a dead letter again. Fails if it was retried before, or if its event or subscriber no
/// longer exists.
pub(crate) async fn retry(
    hub: &Arc<Hub>,
    (tenant, id): (Tenant, Uuid),
    by: Principal,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let now = hub.clock.now();
    hub.run_once(identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            let dead = store::lock(tx, &tenant, id).await.map_err(Error::from)?.ok_or(Error::NoDeadLetter)?;
            check_retryable(tx, &tenant, &dead).await?;
            post_retries(tx, &tenant, &[Retryable { id, subscriber: dead.subscriber }], by, now).await?;
            tracing::info!(dead_letter = %id, %by, "retry of a dead letter requested");
            Ok(StoredResponse::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}

async fn check_retryable(tx: &mut Transaction<'_, Postgres>, tenant: &Tenant, dead: &DeadLetter) -> Result<(), Error> {
    if dead.manual_retry_at.is_some() {
        return Err(Error::AlreadyRetried);
    }
    if dead.event_id.is_none() {
        return Err(Error::EventExpired);
    }
    if directory::store::exists(tx, tenant, dead.subscriber).await? { Ok(()) } else { Err(Error::SubscriberDeleted) }
}

/// Retries up to `limit` matching dead letters, oldest first, in steps of one transaction each. Skips those that were retried
/// before and those whose subscriber or event no longer exists.
pub(crate) async fn retry_many(
    hub: &Hub,
    tenant: &Tenant,
    (filter, limit): (&DeadLetterFilter, u64),
    by: Principal,
    now: DateTime<Utc>,
) -> Result<Retried, Error> {
    let (mut retried, mut after) = (0, None);
    for _ in 0..limit.div_ceil(STEP as u64) {
        let mut tx = hub.db.begin().await?;
        let step = store::lock_many(&mut tx, tenant, filter, (after, STEP)).await?;
        post_retries(&mut tx, tenant, &step, by, now).await?;
        tx.commit().await?;
        retried += step.len() as u64;
        after = step.last().map(|dead| dead.id);
        if step.len() < STEP as usize {
            tracing::info!(retried, %by, "retry of dead letters requested");
            return Ok(Retried { retried, more: false });
        }
    }
    tracing::info!(retried, %by, "retry of dead letters requested; more remain");
    Ok(Retried { retried, more: true })
}

/// Posts a retry command for each dead letter. They are locked.
async fn post_retries(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    dead: &[Retryable],
    by: Principal,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let ids: Vec<Uuid> = dead.iter().map(|dead| dead.id).collect();
    store::mark_retried(tx, &ids, &by.to_string(), now).await?;
    let command = |dead: &Retryable| {
        command_post(tenant, dead.subscriber, &CommandRequest::Retry(RetryRequest { dead_letter: dead.id }))
    };
    let commands = dead.iter().map(command).collect::<Result<Vec<_>, Error>>()?;
    post_all(tx, &CONTROL_SOURCE, &commands).await?;
    Ok(())
}

/// Deletes a dead letter for good. If it blocks its lane, the lane continues. Fails if a retry was requested: the message is
/// sent again, and needs the content of the dead letter.
pub(crate) async fn discard(
    hub: &Arc<Hub>,
    (tenant, id): (Tenant, Uuid),
    by: Principal,
    identity: Option<&RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    hub.run_once(identity, StoreResponse::WithBody, |tx, _| {
        Box::pin(async move {
            let Some(discarded) = store::delete(tx, &tenant, id).await.map_err(Error::from)? else {
                let retried = store::lock(tx, &tenant, id).await.map_err(Error::from)?.is_some();
                return Err(if retried { Error::RetriedBefore } else { Error::NoDeadLetter }.into());
            };
            unblock_lanes(tx, &tenant, &[discarded], by).await?;
            tracing::info!(dead_letter = %id, subscriber = %discarded.subscriber, %by, "discarded a dead letter");
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Discards up to `limit` matching dead letters for which no retry was requested, oldest first, in steps of one transaction each. Messages
/// that are given up during the request stay: the caller cannot have seen them.
pub(crate) async fn discard_many(
    hub: &Hub,
    tenant: &Tenant,
    (mut filter, limit): (DeadLetterFilter, u64),
    by: Principal,
) -> Result<DiscardedMany, Error> {
    filter.to.get_or_insert(hub.clock.now());
    let (mut discarded, mut after) = (0, None);
    for _ in 0..limit.div_ceil(STEP as u64) {
        let mut tx = hub.db.begin().await?;
        let step = store::delete_many(&mut tx, tenant, &filter, (after, STEP)).await?;
        unblock_lanes(&mut tx, tenant, &step, by).await?;
        tx.commit().await?;
        discarded += step.len() as u64;
        after = step.iter().map(|dead| dead.id).max().or(after);
        if step.len() < STEP as usize {
            tracing::info!(discarded, %by, "discarded dead letters");
            return Ok(DiscardedMany { discarded, more: false });
        }
    }
    tracing::info!(discarded, %by, "discarded dead letters; more remain");
    Ok(DiscardedMany { discarded, more: true })
}

/// Commands the dispatchers to continue the lanes that these dead letters block, in the order of the messages.
async fn unblock_lanes(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    discarded: &[Discarded],
    by: Principal,
) -> Result<(), Error> {
    let mut blocking: Vec<&Discarded> = discarded.iter().filter(|dead| dead.blocks_lane).collect();
    blocking.sort_by_key(|dead| dead.n);
    let command = |dead: &&Discarded| {
        let request = DeadLetterRequest { subscriber: dead.subscriber, n: dead.n, by: by.to_string() };
        command_post(tenant, dead.subscriber, &CommandRequest::DeadLetter(request))
    };
    let commands = blocking.iter().map(command).collect::<Result<Vec<_>, Error>>()?;
    if !commands.is_empty() {
        post_all(tx, &CONTROL_SOURCE, &commands).await?;
    }
    Ok(())
}
