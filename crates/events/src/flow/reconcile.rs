//! Reconciliation with the joins service. This service posts the versions of all events, part by part. The joins
//! service replies with the events that differ. This service restates those, one message per event, and the joins
//! service applies them like any other update. The joins service publishes corrected counts in the same way. Because
//! every repair is an ordinary versioned message, an older state never replaces a newer one.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::events::{EventRestated, EventVersions, RESTATED, VERSIONS};
use contracts::joins::JoinsCounted;
use pillarbox::database::{Database, time};
use pillarbox::log::{Post, PostError, post, post_all};
use serde_json::value::to_raw_value;
use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

use super::event::{MESSAGE_SOURCE, message};
pub use crate::domain::{Progress, ReconcileOptions};
use crate::store::event::find_all;
use crate::store::generation::invalidate_feeds;
use crate::store::reconciliation as store;

/// Maximum number of events in one part.
const PART_EVENTS_MAX: i64 = 500;
/// The message about a change that is younger than this may still be in flight.
const IN_FLIGHT_MAX: TimeDelta = TimeDelta::minutes(1);
/// A run that has not posted all parts after this time has crashed.
const POSTING_TIME_MAX: TimeDelta = TimeDelta::minutes(5);
/// Events that ended longer ago than this are not reconciled, and older runs are deleted.
const HISTORY_AGE: TimeDelta = TimeDelta::days(30);

#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error("a message cannot be serialized: {0}")]
    Unserializable(#[from] serde_json::Error),
    #[error("a message cannot be posted: {0}")]
    Post(#[from] PostError),
    #[error("the database failed: {0}; check that it is running, then try again")]
    Database(#[from] sqlx::Error),
}

/// Starts a run and posts the versions of all events. Returns the id of the run; the replies arrive as messages. Fails
/// if the database fails; the parts that are posted by then stay.
pub async fn begin(db: &Database, options: ReconcileOptions) -> Result<Uuid, ReconcileError> {
    let run = Uuid::now_v7();
    let mut connection = db.acquire().await?;
    let now = time::now(&mut connection).await?;
    store::begin(&mut connection, run, options, now).await?;
    drop(connection);
    post_versions(db, run, options, now).await?;
    Ok(run)
}

/// Starts a run if it is due: no repairing run of any process has started within `every`. Fails if the database fails.
pub(crate) async fn begin_if_due(db: &Database, every: TimeDelta) -> Result<(), ReconcileError> {
    let (run, options) = (Uuid::now_v7(), ReconcileOptions::default());
    let mut tx = db.begin().await?;
    let now = time::now(&mut tx).await?;
    if !store::try_lock(&mut tx).await? || store::has_run_since(&mut tx, now - every, now - POSTING_TIME_MAX).await? {
        return Ok(());
    }
    store::delete_runs(&mut tx, now - HISTORY_AGE).await?;
    store::begin(&mut tx, run, options, now).await?;
    tx.commit().await?;
    post_versions(db, run, options, now).await
}

/// The progress of a run; None if the run does not exist.
pub async fn progress(db: &PgPool, run: Uuid) -> sqlx::Result<Option<Progress>> {
    store::progress(&mut *db.acquire().await?, run).await
}

/// Applies the reply of the joins service to one part: restates the requested events and counts the drift. A repeated
/// reply has no effect.
pub(crate) async fn apply_reply(
    tx: &mut Transaction<'_, Postgres>,
    counted: &JoinsCounted,
    now: DateTime<Utc>,
) -> Result<(), ReconcileError> {
    let outdated = store::count_outdated(tx, &counted.wanted, now - IN_FLIGHT_MAX).await?;
    if !store::record_reply(tx, counted, outdated, now).await? {
        return Ok(());
    }
    if !counted.dry_run && !counted.wanted.is_empty() {
        let raised = store::raise_versions(tx, &counted.wanted, counted.force).await?;
        if let Some(event_id) = raised.first() {
            invalidate_feeds(tx, *event_id).await?;
        }
        let ids: Vec<Uuid> = counted.wanted.iter().map(|request| request.event_id).collect();
        restate(tx, &ids).await?;
    }
    let (events, joins) = (counted.events.len() as u64, counted.drifted as u64 + outdated as u64);
    for (service, drifted) in [("events", events), ("joins", joins)] {
        metrics::counter!("pillarbox_reconcile_drift_total", "service" => service).increment(drifted);
    }
    if events + joins > 0 {
        let JoinsCounted { run, part, dry_run, .. } = counted;
        tracing::warn!(%run, part, events, joins, dry_run, "reconciliation found drift");
    }
    Ok(())
}

/// Posts the current state of events.
async fn restate(tx: &mut Transaction<'_, Postgres>, ids: &[Uuid]) -> Result<(), ReconcileError> {
    let restated = find_all(tx, ids).await?.into_iter().map(|event| {
        let restated = EventRestated {
            event: event.to_message(),
            active_participants: event.active_participants,
            count_version: event.count_version,
        };
        message(RESTATED, event.id, &restated)
    });
    post_all(tx, &MESSAGE_SOURCE, &restated.collect::<serde_json::Result<Vec<Post>>>()?).await?;
    Ok(())
}

/// Posts each part in its own transaction, so that no transaction of a large run takes long.
async fn post_versions(
    db: &Database,
    run: Uuid,
    options: ReconcileOptions,
    now: DateTime<Utc>,
) -> Result<(), ReconcileError> {
    let (mut part, mut after) = (0, None);
    loop {
        let mut tx = db.begin().await?;
        let events = store::list_versions(&mut tx, after, now - HISTORY_AGE, PART_EVENTS_MAX).await?;
        let Some(last) = events.last() else {
            store::set_parts(&mut tx, run, part, now).await?;
            return Ok(tx.commit().await?);
        };
        after = Some(last.event_id);
        let versions = EventVersions { run, part, dry_run: options.dry_run, force: options.force, events };
        let payload = to_raw_value(&versions)?;
        post(&mut tx, &MESSAGE_SOURCE, &Post::new(VERSIONS, payload)).await?;
        tx.commit().await?;
        part += 1;
    }
}
