//! The sweep: expires the registrations of ended and canceled events and promotes long waitlists, step by step.

use chrono::TimeDelta;
use pillarbox::database::{Database, DatabaseTransaction};
use runtime::clock::Clock;
use uuid::Uuid;

use super::command_batch::CommandBatch;
use crate::error::Error;
use crate::store;

/// An event whose sweep failed is postponed by this time, so that it does not block the sweeps of other events.
const POSTPONE: TimeDelta = TimeDelta::minutes(1);

/// Sweeps one step of the event that has been due for the longest time. Returns false if no event is due.
pub(crate) async fn sweep_next(db: &Database, clock: &Clock) -> Result<bool, Error> {
    let mut tx = db.begin().await?;
    let Some(event_id) = store::lock_due_event(&mut tx, clock.now()).await? else { return Ok(false) };
    match sweep_event(tx, clock, event_id).await {
        Ok(()) => Ok(true),
        // The event is not the cause; the worker retries.
        Err(error) if error.is_transient() => Err(error),
        Err(error) => {
            postpone(db, event_id, clock).await?;
            Err(error)
        }
    }
}

async fn sweep_event(mut tx: DatabaseTransaction<'_>, clock: &Clock, event_id: Uuid) -> Result<(), Error> {
    let mut batch = CommandBatch::load_event(&mut tx, clock, event_id).await?;
    batch.run_due_sweep();
    batch.save(&mut tx).await?;
    Ok(tx.commit().await?)
}

async fn postpone(db: &Database, event_id: Uuid, clock: &Clock) -> sqlx::Result<()> {
    store::postpone_sweep(&mut *db.acquire().await?, event_id, clock.now() + POSTPONE).await
}
