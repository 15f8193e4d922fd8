//! Use cases of the greetings service, one transaction each.

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::database::{Database, time};
use pillarbox::log::{Post, PostError, Source, post};
use runtime::worker::Round;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::contract::{GreetingReceived, RECEIVED, SOURCE};
use super::store;

/// How long an answered greeting is retained.
const RETENTION: TimeDelta = TimeDelta::days(1);

/// Stores a greeting and publishes it, both in the caller's transaction. Returns its id.
pub(super) async fn receive(
    tx: &mut Transaction<'_, Postgres>,
    name: &str,
    now: DateTime<Utc>,
) -> Result<Uuid, PostError> {
    let id = Uuid::now_v7();
    store::insert(tx, id, name, now).await?;
    let payload = to_raw_value(&GreetingReceived { id }).map_err(|error| sqlx::Error::Encode(error.into()))?;
    post(tx, &Source::new(SOURCE), &Post::new(RECEIVED, payload).with_key(id.to_string())).await?;
    Ok(id)
}

/// Deletes answered greetings after their retention, by the database's time.
pub(super) async fn remove_old(db: &Database) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    let now = time::now(&mut db).await?;
    store::delete_answered(&mut db, now - RETENTION).await?;
    Ok(Round::Idle)
}
