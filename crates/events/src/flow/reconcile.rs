//! Comparing counts with the joins service: what is known here is stated, part by part; what is counted there comes back, and
//! is taken over.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::{EventStated, EventsStated, STATED};
use contracts::joins::JoinsCounted;
use mailbox::post::{Post, PostError, post};
use serde_json::value::to_raw_value;
use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

use super::event::POSTED_BY;
use crate::domain::Event;
use crate::store::reconciliation as store;

const PART_EVENTS_MAX: i64 = 500;
/// A message takes 256 KB; titles and cities can be long.
const PART_BYTES_MAX: usize = 200 * 1024;
/// Who went to what is long over is history.
const ENDED_FOR: TimeDelta = TimeDelta::days(30);

/// How it is to be done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked {
    /// Only look.
    pub dry_run: bool,
    /// Whatever the versions say: after one database was set back.
    pub force: bool,
}

/// How far a run is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// None until all are posted.
    pub parts: Option<i32>,
    pub answered: i32,
    pub checked: i32,
    /// Counts of the events service that were not right, and how many of them are now.
    pub drifted: i32,
    pub repaired: i32,
    /// Events that the joins service did not know as they are.
    pub joins_drifted: i32,
    pub joins_repaired: i32,
    pub finished_at: Option<DateTime<Utc>>,
}

#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error("post: {0}")]
    Post(#[from] PostError),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

/// Starts a run and states everything; returns its name. The answers come by message.
pub async fn begin(db: &PgPool, asked: Asked, now: DateTime<Utc>) -> Result<Uuid, ReconcileError> {
    let run = Uuid::now_v7();
    store::begin(&mut *db.acquire().await?, run, asked, now).await?;
    state_all(db, run, asked, now).await?;
    Ok(run)
}

/// The same by time, unless one has begun since, here or elsewhere.
pub(crate) async fn begin_unless_since(
    db: &PgPool,
    since: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Result<(), ReconcileError> {
    let (run, asked) = (Uuid::now_v7(), Asked::default());
    let mut tx = db.begin().await?;
    if !store::take_turn(&mut tx).await? || store::has_begun_since(&mut tx, since).await? {
        return Ok(());
    }
    store::forget(&mut tx, now - ENDED_FOR).await?;
    store::begin(&mut tx, run, asked, now).await?;
    tx.commit().await?;
    state_all(db, run, asked, now).await
}

pub async fn progress(db: &PgPool, run: Uuid) -> sqlx::Result<Option<Progress>> {
    store::progress(&mut *db.acquire().await?, run).await
}

/// The joins service has counted a part.
pub(crate) async fn take_over(
    tx: &mut Transaction<'_, Postgres>,
    counted: &JoinsCounted,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let drifted = store::drifted(tx, counted).await?;
    let repaired = match counted.dry_run {
        true => 0,
        false => store::repair(tx, counted).await?,
    };
    if !store::answered(tx, counted, (drifted.len() as i64, repaired), now).await? {
        return Ok(());
    }
    metrics::counter!("pillarbox_reconcile_drift_total", "service" => "events").increment(drifted.len() as u64);
    if !drifted.is_empty() || counted.drifted > 0 {
        tracing::warn!(run = %counted.run, part = counted.part, events = drifted.len(), joins = counted.drifted, repaired,
            dry_run = counted.dry_run, "counts had drifted");
    }
    Ok(())
}

/// A transaction for each part: a large run keeps nobody waiting.
async fn state_all(db: &PgPool, run: Uuid, asked: Asked, now: DateTime<Utc>) -> Result<(), ReconcileError> {
    let (mut part, mut after) = (0, None);
    loop {
        let mut tx = db.begin().await?;
        let found = store::to_state(&mut tx, after, now - ENDED_FOR, PART_EVENTS_MAX).await?;
        let events = that_fit(found);
        let Some(last) = events.last() else {
            store::posted(&mut tx, run, part, now).await?;
            return Ok(tx.commit().await?);
        };
        after = Some(last.event.event_id);
        let stated = EventsStated { run, part, dry_run: asked.dry_run, force: asked.force, events };
        let payload = to_raw_value(&stated).map_err(|error| sqlx::Error::Encode(error.into()))?;
        post(&mut tx, &POSTED_BY, &Post::new(STATED, payload)).await?;
        tx.commit().await?;
        part += 1;
    }
}

/// As many of the first as fit into a message; at least one does.
fn that_fit(found: Vec<Event>) -> Vec<EventStated> {
    let mut room = PART_BYTES_MAX;
    let stated = found.into_iter().map(|event| EventStated {
        event: event.told(),
        active_participants: event.active_participants,
        count_version: event.count_version,
    });
    let mut fits = |event: &EventStated| {
        let left = serde_json::to_vec(event).ok().and_then(|bytes| room.checked_sub(bytes.len() + 1));
        room = left.unwrap_or(0);
        left.is_some()
    };
    stated.take_while(|event| fits(event)).collect()
}
