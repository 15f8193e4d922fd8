//! Commits the outcomes and the new positions of a batch, together with its effects.

use std::collections::BTreeMap;

use sqlx::{Postgres, Transaction};

use super::outcomes::{KeyState, Outcomes};
use super::positions::{self, SingleSave};
use super::processor::{ConsumerError, WorkerContext};
use super::replay_reader::ReplayShard;
use crate::log::Position;

/// Commits everything in one transaction. `tx` holds the effects, if there are any. Returns the keys whose parked
/// messages have changed. Fails with `LeaseLost` if the shard worker has lost its lease, and with `Invalidated` if the
/// database has lost transactions that a position contains.
pub(super) async fn commit(
    context: &WorkerContext,
    mut tx: Option<Transaction<'static, Postgres>>,
    outcomes: &Outcomes<'_>,
    replays: &[ReplayShard],
    positions: &BTreeMap<i16, Position>,
) -> Result<Vec<KeyState>, ConsumerError> {
    let has_only_positions = outcomes.is_plain() && replays.is_empty();
    if has_only_positions && save_positions(context, tx.as_mut(), positions).await? {
        if let Some(tx) = tx {
            tx.commit().await?;
        }
        return Ok(Vec::new());
    }
    let has_effects = tx.is_some();
    let mut tx = match tx {
        Some(tx) => tx,
        None => context.db.begin().await?,
    };
    context.lock(&mut tx, has_effects).await?;
    let keys = outcomes.save(&mut tx).await?;
    for replay in replays {
        replay.save(&mut tx).await?;
    }
    if !positions::append(&mut tx, &context.consumer, positions).await? {
        return Err(ConsumerError::Invalidated);
    }
    tx.commit().await?;
    Ok(keys)
}

/// Commits effects that belong to no new position. Fails with `LeaseLost` if the shard worker has lost its lease.
pub(super) async fn commit_deferred(
    context: &WorkerContext,
    mut tx: Transaction<'static, Postgres>,
) -> Result<(), ConsumerError> {
    context.lock(&mut tx, true).await?;
    Ok(tx.commit().await?)
}

/// Commits the positions with a single statement, which avoids a round trip. Returns false if they need several
/// statements.
async fn save_positions(
    context: &WorkerContext,
    mut tx: Option<&mut Transaction<'static, Postgres>>,
    positions: &BTreeMap<i16, Position>,
) -> Result<bool, ConsumerError> {
    let (consumer, owner) = (&context.consumer, context.owner);
    let saved = match tx.as_deref_mut() {
        Some(tx) => positions::lock_and_append(&mut **tx, consumer, owner, positions, true).await?,
        None => positions::lock_and_append(&context.db, consumer, owner, positions, false).await?,
    };
    match saved {
        SingleSave::Saved => Ok(true),
        SingleSave::SeveralWindows => Ok(false),
        SingleSave::Refused => Err(refusal(context, tx).await?),
    }
}

/// Determines why the positions were not saved. It happens too seldom for the statement itself to return the reason.
async fn refusal(
    context: &WorkerContext,
    tx: Option<&mut Transaction<'static, Postgres>>,
) -> Result<ConsumerError, ConsumerError> {
    match tx {
        Some(tx) => context.lock(tx, true).await?,
        None => context.lock(&mut context.db.begin().await?, true).await?,
    }
    // The worker has its lease, so the positions are ahead of the database.
    Ok(ConsumerError::Invalidated)
}
