//! Comparing events with the joins service. Versions are stated, part by part; the answer names what differs; and that is said
//! again, one event at a time, as news that are believed like any others. What the joins service has to correct it says in
//! the same way. So nothing that is older ever replaces what is newer.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::{EventRestated, EventVersions, RESTATED, VERSIONS};
use contracts::joins::JoinsCounted;
use mailbox::post::{Post, PostError, post, post_all};
use serde_json::value::to_raw_value;
use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

use super::event::{POSTED_BY, message};
use crate::store::event::find_all;
use crate::store::feed::outdate;
use crate::store::reconciliation as store;

const PART_EVENTS_MAX: i64 = 500;
/// News of a change within this time may still be on their way.
const ON_THEIR_WAY: TimeDelta = TimeDelta::minutes(1);
/// A run that has not stated everything after this long has broken off.
const STATED_WITHIN: TimeDelta = TimeDelta::minutes(5);
/// Who went to what is long over is history.
const ENDED_FOR: TimeDelta = TimeDelta::days(30);

/// How it is to be done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked {
    /// Only look.
    pub dry_run: bool,
    /// Take no version on trust: say everything again, under new versions. After one database was set back.
    pub force: bool,
}

/// How far a run is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// None until all are posted.
    pub parts: Option<i32>,
    pub answered: i32,
    pub checked: i32,
    /// Counts of the events service that were not right, and how many of them are being put right.
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

/// The same by time, unless one that repairs has run since, here or elsewhere.
pub(crate) async fn begin_unless_since(
    db: &PgPool,
    since: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Result<(), ReconcileError> {
    let (run, asked) = (Uuid::now_v7(), Asked::default());
    let mut tx = db.begin().await?;
    if !store::take_turn(&mut tx).await? || store::has_run_since(&mut tx, since, now - STATED_WITHIN).await? {
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

/// The joins service has compared a part: what differs is said again.
pub(crate) async fn take_up(
    tx: &mut Transaction<'_, Postgres>,
    counted: &JoinsCounted,
    now: DateTime<Utc>,
) -> Result<(), ReconcileError> {
    let unheard = store::count_unheard(tx, &counted.wanted, now - ON_THEIR_WAY).await?;
    if !store::answered(tx, counted, unheard, now).await? {
        return Ok(());
    }
    if !counted.dry_run && !counted.wanted.is_empty() {
        if let Some(lifted) = store::lift(tx, &counted.wanted, counted.force).await?.first() {
            outdate(tx, *lifted).await?;
        }
        let ids: Vec<Uuid> = counted.wanted.iter().map(|wanted| wanted.event_id).collect();
        let restated = find_all(tx, &ids).await?.into_iter().map(|event| {
            let restated = EventRestated {
                event: event.told(),
                active_participants: event.active_participants,
                count_version: event.count_version,
            };
            message(RESTATED, event.id, &restated)
        });
        post_all(tx, &POSTED_BY, &restated.collect::<sqlx::Result<Vec<Post>>>()?).await?;
    }
    let (events, joins) = (counted.events.len() as u64, counted.drifted as u64 + unheard as u64);
    for (service, drifted) in [("events", events), ("joins", joins)] {
        metrics::counter!("pillarbox_reconcile_drift_total", "service" => service).increment(drifted);
    }
    if events + joins > 0 {
        tracing::warn!(run = %counted.run, part = counted.part, events, joins, dry_run = counted.dry_run, "drift was found");
    }
    Ok(())
}

/// A transaction for each part: a large run keeps nobody waiting.
async fn state_all(db: &PgPool, run: Uuid, asked: Asked, now: DateTime<Utc>) -> Result<(), ReconcileError> {
    let (mut part, mut after) = (0, None);
    loop {
        let mut tx = db.begin().await?;
        let events = store::to_state(&mut tx, after, now - ENDED_FOR, PART_EVENTS_MAX).await?;
        let Some(last) = events.last() else {
            store::posted(&mut tx, run, part, now).await?;
            return Ok(tx.commit().await?);
        };
        after = Some(last.event_id);
        let stated = EventVersions { run, part, dry_run: asked.dry_run, force: asked.force, events };
        let payload = to_raw_value(&stated).map_err(|error| sqlx::Error::Encode(error.into()))?;
        post(&mut tx, &POSTED_BY, &Post::new(VERSIONS, payload)).await?;
        tx.commit().await?;
        part += 1;
    }
}
