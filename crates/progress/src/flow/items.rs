//! Marking items as done.

use std::sync::Arc;

use crate::Progress;
use crate::counts::Changed;
use crate::domain::{Items, Project};
use crate::error::Error;
use crate::flow::{ATTEMPTS, completion, initialised, lost, reload};

/// Counts the items that were not counted before. The items of a finished project have no effect, so that a worker whose
/// message is delivered again does not fail. Fails if the project has ended and cannot be archived: the worker repeats the request.
pub(crate) async fn mark(progress: &Progress, project: Arc<Project>, items: &Items) -> Result<Changed, Error> {
    let mut project = project;
    for attempt in 1..=ATTEMPTS {
        if let Some(finished) = project.finished {
            return Ok(Changed { snapshot: finished.snapshot, counted: 0, ended: None });
        }
        let Some(counts) = initialised(progress, &project).await? else {
            project = reload(progress, &project.id).await?;
            continue;
        };
        if let Some(changed) = progress.state.mark(&counts, items).await? {
            progress.items_counted.increment(changed.counted.unsigned_abs());
            if changed.snapshot.status.is_final() {
                completion::ensure_archived(progress, &counts, &changed.snapshot, changed.ended).await?;
            }
            return Ok(changed);
        }
        // The project may have finished, or have been initialised again, since it was cached.
        let current = reload(progress, &project.id).await?;
        if attempt > 1 && current.token == counts.token && current.finished.is_none() {
            return Err(lost(progress, &current));
        }
        project = current;
    }
    Err(Error::Contended)
}
