//! Listing, retrying and discarding dead letters.

use chrono::{DateTime, Utc};
use http_kit::auth::Principal;
use pillarbox::log::Tenant;
use pillarbox::log::post_all;
use sqlx::{Postgres, Transaction};
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

/// An action on many dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BulkAction {
    Retry,
    Discard,
}

/// The result of an action on many dead letters.
#[derive(Debug)]
pub(crate) struct Changed {
    pub(crate) count: u64,
    /// Whether matching dead letters remain.
    pub(crate) more: bool,
}

/// Returns dead letters newest first, those with ids below `before`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    filter: &DeadLetterFilter,
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<DeadLetter>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, tenant, filter, before, limit).await?)
}

/// Returns a dead letter with the snapshots of its event and subscriber.
pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<DeadLetterWithSnapshots, Error> {
    store::find(&mut *hub.db.acquire().await?, tenant, id).await?.ok_or(Error::NoDeadLetter)
}

/// Commands fan-out to send a dead letter again. Fails if it was retried before, or if its event or subscriber no
/// longer exists.
pub(crate) async fn retry(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: Uuid,
    by: Principal,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let dead = store::lock(tx, tenant, id).await?.ok_or(Error::NoDeadLetter)?;
    check_retryable(tx, tenant, &dead).await?;
    post_retries(tx, tenant, &[Retryable { id, subscriber: dead.subscriber }], by, now).await?;
    tracing::info!(dead_letter = %id, %by, "retry of a dead letter requested");
    Ok(())
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

/// Retries or discards up to `limit` matching dead letters, oldest first, in steps of one transaction each. Skips those for which a
/// retry was requested, and a retry skips those whose subscriber or event no longer exists. Messages that are given up while others are
/// discarded stay: the caller cannot have seen them.
pub(crate) async fn change_many(
    hub: &Hub,
    tenant: &Tenant,
    action: BulkAction,
    mut filter: DeadLetterFilter,
    limit: u64,
    by: Principal,
) -> Result<Changed, Error> {
    let now = hub.clock.now();
    if action == BulkAction::Discard {
        filter.to.get_or_insert(now);
    }
    let (mut changed, mut after) = (Changed { count: 0, more: true }, None);
    for _ in 0..limit.div_ceil(STEP as u64) {
        let mut tx = hub.db.begin().await?;
        let ids: Vec<Uuid> = match action {
            BulkAction::Retry => {
                let step = store::lock_many(&mut tx, tenant, &filter, after, STEP).await?;
                post_retries(&mut tx, tenant, &step, by, now).await?;
                step.iter().map(|dead| dead.id).collect()
            }
            BulkAction::Discard => {
                let step = store::delete_many(&mut tx, tenant, &filter, after, STEP).await?;
                unblock_lanes(&mut tx, tenant, &step, by).await?;
                step.iter().map(|dead| dead.id).collect()
            }
        };
        tx.commit().await?;
        changed.count += ids.len() as u64;
        changed.more = ids.len() as i64 == STEP;
        if !changed.more {
            break;
        }
        after = ids.into_iter().max();
    }
    tracing::info!(?action, count = changed.count, more = changed.more, %by, "changed dead letters");
    Ok(changed)
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
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: Uuid,
    by: Principal,
) -> Result<(), Error> {
    let Some(discarded) = store::delete(tx, tenant, id).await? else {
        let is_retried = store::lock(tx, tenant, id).await?.is_some();
        return Err(if is_retried { Error::RetriedBefore } else { Error::NoDeadLetter });
    };
    unblock_lanes(tx, tenant, &[discarded], by).await?;
    tracing::info!(dead_letter = %id, subscriber = %discarded.subscriber, %by, "discarded a dead letter");
    Ok(())
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
