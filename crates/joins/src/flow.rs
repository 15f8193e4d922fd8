//! Use-cases: the only place that decides.

pub(crate) mod ledger;
pub(crate) mod look;
pub(crate) mod reconcile;

use chrono::{DateTime, Utc};
use sqlx::{PgPool, Postgres, Transaction};

use self::ledger::Ledger;
use crate::domain::{Actor, Command, Order};
use crate::error::Error;
use crate::store;

/// Follows one order in the caller's transaction.
pub(crate) async fn settle(tx: &mut Transaction<'_, Postgres>, order: &Order, now: DateTime<Utc>) -> Result<(), Error> {
    let mut ledger = Ledger::open(tx, [order]).await?;
    ledger.apply(order, now)?;
    ledger.close(tx).await.map(drop)
}

/// Does a part of what is due for one event; false: nothing is due.
pub(crate) async fn sweep(db: &PgPool, now: DateTime<Utc>) -> Result<bool, Error> {
    let mut tx = db.begin().await?;
    let Some(event_id) = store::due(&mut tx, now).await? else { return Ok(false) };
    settle(&mut tx, &Order::new(event_id, Actor::System, Command::Sweep), now).await?;
    tx.commit().await?;
    Ok(true)
}
