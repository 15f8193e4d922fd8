//! Use-cases: the only place that decides.

pub(crate) mod ledger;
pub(crate) mod look;
pub(crate) mod reconcile;

use chrono::TimeDelta;
use kit::clock::Clock;
use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

use self::ledger::Ledger;
use crate::domain::{Actor, Command, Order};
use crate::error::Error;
use crate::store;

/// An event whose sweep failed lets others go first, so that it holds up nobody but itself.
const PUT_OFF: TimeDelta = TimeDelta::minutes(1);

/// Follows some orders, one after the other, in the caller's transaction.
pub(crate) async fn settle(tx: &mut Transaction<'_, Postgres>, clock: &Clock, orders: &[Order]) -> Result<(), Error> {
    let mut ledger = Ledger::open(tx, clock, orders).await?;
    for order in orders {
        ledger.apply(order)?;
    }
    ledger.close(tx).await.map(drop)
}

/// Does a part of what is due for one event; false: nothing is due.
pub(crate) async fn sweep(db: &PgPool, clock: &Clock) -> Result<bool, Error> {
    let mut tx = db.begin().await?;
    let Some(event_id) = store::due(&mut tx, clock.now()).await? else { return Ok(false) };
    match sweep_one(tx, clock, event_id).await {
        Ok(()) => Ok(true),
        Err(error) => {
            // If this fails, too, it is not the event: the worker tries again.
            put_off(db, event_id, clock).await.ok();
            Err(error)
        }
    }
}

async fn put_off(db: &PgPool, event_id: Uuid, clock: &Clock) -> sqlx::Result<()> {
    store::put_off(&mut *db.acquire().await?, event_id, clock.now() + PUT_OFF).await
}

async fn sweep_one(mut tx: Transaction<'_, Postgres>, clock: &Clock, event_id: Uuid) -> Result<(), Error> {
    // Opening it does what is due: the order only names the event.
    let named = Order::new(event_id, Actor::System, Command::Sweep);
    Ledger::open(&mut tx, clock, [&named]).await?.close(&mut tx).await?;
    Ok(tx.commit().await?)
}
