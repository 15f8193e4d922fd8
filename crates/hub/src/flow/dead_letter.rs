use chrono::{DateTime, Utc};
use kit::auth::{Principal, Tenant};
use mailbox::post::{Post, post_all};
use serde::Serialize;
use serde_json::json;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::Hub;
use crate::error::Error;
use crate::fanout::{CONTROL, RETRY_DEAD_LETTER};
use crate::store::dead_letter::{self as store, DeadLetter, Snapshots, Which};
use crate::store::subscriber;

/// Many are retried in steps, each a transaction.
const STEP: i64 = 1_000;
const STEPS_MAX: u64 = 100;

/// What was done to many.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RetriedDeadLetters)]
pub(crate) struct Retried {
    retried: u64,
    /// There are more: ask again.
    more: bool,
}

/// Newest first, behind `before`.
pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    which: &Which,
    (before, limit): (Option<Uuid>, u32),
) -> Result<Vec<DeadLetter>, Error> {
    Ok(store::list(&mut *hub.db.acquire().await?, tenant, which, (before, limit)).await?)
}

pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<(DeadLetter, Snapshots), Error> {
    store::find(&mut *hub.db.acquire().await?, tenant, id).await?.ok_or(Error::NoDeadLetter)
}

/// Asks the owner of the subscriber's shard to send it again.
pub(crate) async fn retry(
    tx: &mut Transaction<'_, Postgres>,
    (tenant, id): (&Tenant, Uuid),
    by: Principal,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let dead = store::lock(tx, tenant, id).await?.ok_or(Error::NoDeadLetter)?;
    if dead.retried.is_some() {
        return Err(Error::AlreadyRetried);
    }
    if dead.event.is_none() {
        return Err(Error::EventGone);
    }
    if !subscriber::exists(tx, tenant, dead.subscriber).await? {
        return Err(Error::SubscriberGone);
    }
    ask_again(tx, tenant, &[(id, dead.subscriber)], by, now).await?;
    tracing::info!(dead_letter = %id, %by, "retried a dead letter");
    Ok(())
}

/// The oldest first. One that was retried already, or has no subscriber or no event any more, is
/// passed over.
pub(crate) async fn retry_many(
    hub: &Hub,
    tenant: &Tenant,
    which: &Which,
    by: Principal,
    now: DateTime<Utc>,
) -> Result<Retried, Error> {
    let (mut retried, mut after) = (0, None);
    for _ in 0..STEPS_MAX {
        let mut tx = hub.db.begin().await?;
        let step = store::lock_many(&mut tx, tenant, which, (after, STEP)).await?;
        ask_again(&mut tx, tenant, &step, by, now).await?;
        tx.commit().await?;
        hub.watcher.nudge();
        retried += step.len() as u64;
        after = step.last().map(|(id, _)| *id);
        if step.len() < STEP as usize {
            tracing::info!(retried, %by, "retried dead letters");
            return Ok(Retried { retried, more: false });
        }
    }
    tracing::info!(retried, %by, "retried dead letters; there are more");
    Ok(Retried { retried, more: true })
}

/// Each is a pair of a dead letter and its subscriber, locked.
async fn ask_again(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    dead: &[(Uuid, Uuid)],
    by: Principal,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let ids: Vec<Uuid> = dead.iter().map(|(id, _)| *id).collect();
    store::mark_retried(tx, &ids, &by.to_string(), now).await?;
    let command = |(id, subscriber): &(Uuid, Uuid)| {
        let payload = to_raw_value(&json!({"dead_letter": id})).map_err(|error| sqlx::Error::Encode(error.into()))?;
        let post = Post { tenant: tenant.clone(), ..Post::new(RETRY_DEAD_LETTER, payload) };
        Ok(post.with_key(subscriber.to_string()))
    };
    let commands = dead.iter().map(command).collect::<Result<Vec<_>, Error>>()?;
    post_all(tx, &CONTROL, &commands).await?;
    Ok(())
}
