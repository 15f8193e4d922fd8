//! The end of a project: archived in PostgreSQL, with `job.completed` in the same transaction.
//!
//! The counts decide that a project is complete, together with the change that completes it. The steps that follow here may be
//! interrupted: a request that finds final counts of a project whose row is not final repeats it, and so does the periodic check.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use contracts::progress::{JOB_COMPLETED, JobCompleted, SOURCE};
use pillarbox::database::{Database, time};
use pillarbox::log::{AggregateId, Post, Source, post};
use runtime::worker::Round;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::Progress;
use crate::counts::Counts;
use crate::domain::{Project, Snapshot, Status};
use crate::error::{Error, StateError};
use crate::flow::reload;
use crate::store::project as store;

const MESSAGE_SOURCE: Source = Source::new(SOURCE);
const AGGREGATE_TYPE: &str = "PROJECT";
/// Projects per round of the check, and the pause between two rounds. Together they bound its cost: with more unfinished
/// projects than a round has, each of them is checked less often.
const CHECKED: i64 = 500;
const CHECK_PAUSE: Duration = Duration::from_millis(250);
/// After this many projects that fail, a round ends.
const FAILURES_MAX: u32 = 20;

/// Archives counts that are final since `ended`, unless they are archived. Returns the project as it is then. Fails if they cannot be archived; then the
/// caller must not get the impression that the project has completed.
pub(crate) async fn ensure_archived(
    progress: &Progress,
    counts: &Counts,
    snapshot: &Snapshot,
    ended: Option<DateTime<Utc>>,
) -> Result<Arc<Project>, Error> {
    let project = reload(progress, &counts.project_id).await?;
    if project.finished.is_some() || project.token != counts.token {
        return Ok(project);
    }
    if let Err(error) = archive(progress, &progress.db, &project, snapshot, ended).await {
        tracing::warn!(%error, "a finished project could not be archived; the periodic check repeats it");
        return Err(Error::NotArchived);
    }
    reload(progress, &counts.project_id).await
}

/// Archives the final counts of a project in a separate transaction.
async fn archive(
    progress: &Progress,
    db: &Database,
    project: &Project,
    snapshot: &Snapshot,
    ended: Option<DateTime<Utc>>,
) -> Result<(), Error> {
    let mut tx = db.begin().await?;
    let completes = archive_in(&mut tx, project, snapshot, ended).await?;
    tx.commit().await?;
    if completes {
        metrics::counter!("pillarbox_progress_completed_total").increment(1);
    }
    progress.projects.invalidate(&project.id).await;
    Ok(())
}

/// Archives the final counts of a project. Posts `job.completed` if it is DONE, and only once. Returns whether it did.
pub(crate) async fn archive_in(
    tx: &mut Transaction<'_, Postgres>,
    project: &Project,
    snapshot: &Snapshot,
    ended: Option<DateTime<Utc>>,
) -> Result<bool, Error> {
    let now = time::now(tx).await?;
    // False if another process was faster, or the project has been initialised again.
    let finishes = store::finish(tx, &project.id, project.token, snapshot, now).await?;
    let completes =
        finishes && snapshot.status == Status::Done && store::insert_completed(tx, &project.id, now).await?;
    if completes {
        let id = message_id(project.token, ended.unwrap_or(now));
        post(tx, &MESSAGE_SOURCE, &completed(project, snapshot, id, now)?).await?;
    }
    Ok(completes)
}

/// The id of the message of a completion. After a failover of PostgreSQL that has lost it, it is posted again with the same id, and
/// consumers that have seen it recognise it.
fn message_id(token: Uuid, ended: DateTime<Utc>) -> Uuid {
    let [_, _, _, _, _, _, random @ ..] = token.into_bytes();
    uuid::Builder::from_unix_timestamp_millis(ended.timestamp_millis().unsigned_abs(), &random).into_uuid()
}

fn completed(
    project: &Project,
    snapshot: &Snapshot,
    id: Uuid,
    completed_at: DateTime<Utc>,
) -> Result<Post, serde_json::Error> {
    let payload = JobCompleted {
        project_id: project.id.clone(),
        total: snapshot.total,
        done: snapshot.done,
        errors: snapshot.errors,
        completed_at,
    };
    let mut message = Post::new(JOB_COMPLETED, to_raw_value(&payload)?).with_key(&project.id);
    message.aggregate_type = Some(AGGREGATE_TYPE.to_owned());
    message.aggregate_id = Some(AggregateId::Text(project.id.clone()));
    message.tenant = project.tenant.clone();
    message.id = Some(id);
    Ok(message)
}

/// Walks over the unfinished projects, again and again. It finishes what a crash has interrupted, and completes projects whose
/// counts another program has changed.
#[derive(Default)]
pub(crate) struct Check {
    /// The last project of the previous round; empty at the beginning of the walk.
    after: Mutex<String>,
}

impl Check {
    pub(crate) async fn run_once(&self, progress: &Progress, db: &Database) -> Result<Round, Error> {
        let after = self.after.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Final counts stay for this time after the project has expired.
        let expired_before = progress.clock.now() - progress.ttl;
        let projects = store::unfinished(&mut *db.acquire().await?, &after, CHECKED, expired_before).await?;
        let is_full = projects.len() as i64 == CHECKED;
        // Whatever happens to these projects, the next round continues after them.
        let last = projects.last().filter(|_| is_full).map(|project| project.id.clone());
        *self.after.lock().unwrap_or_else(PoisonError::into_inner) = last.unwrap_or_default();
        let counts: Vec<Counts> = projects.iter().filter_map(Counts::of).collect();
        let readings = match progress.state.read(&counts, true).await {
            Ok(readings) => readings,
            // Readiness names the server already.
            Err(StateError::Unavailable { .. } | StateError::Refused(_) | StateError::MemoryFull) => {
                return Ok(Round::Idle);
            }
            Err(error) => return Err(error.into()),
        };
        let mut failures = 0;
        for (project, reading) in projects.iter().zip(readings) {
            let ended = match reading {
                Ok(Some(reading)) if reading.snapshot.status.is_final() => {
                    archive(progress, db, project, &reading.snapshot, reading.ended).await
                }
                Ok(_) => Ok(()),
                Err(error) => Err(error.into()),
            };
            // One project that fails does not block the others. A database that is away fails all of them.
            if let Err(error) = ended {
                tracing::warn!(%error, project = project.id, "a project could not be checked; this is repeated");
                failures += 1;
                if failures == FAILURES_MAX {
                    return Err(error);
                }
            }
        }
        Ok(if is_full { Round::IdleFor(CHECK_PAUSE) } else { Round::Idle })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_a_completion_has_one_id_of_version_7() {
        let (token, ended) = (Uuid::new_v4(), DateTime::from_timestamp_millis(1_800_000_000_123).unwrap());
        let id = message_id(token, ended);
        assert_eq!(id, message_id(token, ended));
        assert_ne!(id, message_id(Uuid::new_v4(), ended));
        assert_eq!(pillarbox::log::created_at(id), Some(ended));
    }
}
