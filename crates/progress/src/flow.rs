//! Use cases: they apply the rules of `domain`, change the counts, and record the end of a project.

pub(crate) mod completion;
pub(crate) mod deletion;
pub(crate) mod items;
pub(crate) mod project;
pub(crate) mod repeat;

use std::sync::Arc;

use sqlx::{Postgres, Transaction};

use crate::Progress;
use crate::counts::Counts;
use crate::domain::Project;
use crate::error::Error;
use crate::store::project as store;

/// Attempts for a request that meets other ones: a changed token, or a changed status.
const ATTEMPTS: u32 = 10;

/// Finds a project. It may have changed since it was cached; a request with a stale token finds no counts, and loads it again.
pub(crate) async fn find(progress: &Progress, id: &str) -> Result<Arc<Project>, Error> {
    match progress.projects.get(id).await {
        Some(project) => Ok(project),
        None => reload(progress, id).await,
    }
}

/// Loads a project, past the cache.
pub(crate) async fn reload(progress: &Progress, id: &str) -> Result<Arc<Project>, Error> {
    let found = store::find(&mut *progress.db.acquire().await?, id).await?.ok_or(Error::NotFound)?;
    let found = Arc::new(found);
    progress.projects.insert(id.to_owned(), found.clone()).await;
    Ok(found)
}

/// The counts of a project, which are initialised first if they were not; None if it has finished by then.
///
/// Nothing is counted before the server that has them is recorded, and both happen under the lock of the row. So counts that were
/// recorded and are missing are never initialised again, whatever was cached.
pub(crate) async fn initialised(progress: &Progress, project: &Project) -> Result<Option<Counts>, Error> {
    if let Some(counts) = Counts::of(project) {
        return Ok(Some(counts));
    }
    // Before a connection waits for it.
    progress.state.check().await?;
    let mut tx = progress.db.begin().await?;
    let counts = initialised_in(progress, &mut tx, &project.id).await?;
    tx.commit().await?;
    progress.projects.invalidate(&project.id).await;
    Ok(counts)
}

/// The same in the caller's transaction, which locks the row of the project.
pub(crate) async fn initialised_in(
    progress: &Progress,
    tx: &mut Transaction<'_, Postgres>,
    id: &str,
) -> Result<Option<Counts>, Error> {
    let mut current = store::lock(tx, id).await?.ok_or(Error::NotFound)?;
    if current.finished.is_some() {
        return Ok(None);
    }
    if current.run.is_none() {
        let run = progress.state.initialise(tx, id, current.token, current.expires_at).await?;
        store::set_run(tx, id, current.token, &run).await?;
        current.run = Some(run);
    }
    Ok(Counts::of(&current))
}

/// The reason why there are no counts of this project.
pub(crate) fn lost(progress: &Progress, project: &Project) -> Error {
    if project.expires_at <= progress.clock.now() {
        Error::Expired(project.id.clone())
    } else {
        Error::Lost(project.id.clone())
    }
}
