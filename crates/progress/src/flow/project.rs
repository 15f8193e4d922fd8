//! Creating, showing, listing, changing and restarting projects.

use std::sync::Arc;

use chrono::{DateTime, TimeDelta, Utc};
use http_kit::auth::Caller;
use http_kit::etag::IfMatch;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::counts::{Counts, Reading, Replaced};
use crate::domain::{self, Change, Project, Snapshot, Target};
use crate::error::Error;
use crate::flow::{ATTEMPTS, completion, initialised, initialised_in, lost, reload};
use crate::state::{PostgresState, RedisState};
use crate::store::project as store;
use crate::{Progress, view};

/// Inserts a project in the caller's transaction. Returns the existing one if the same owner has created it, and nothing was
/// initialised: the request is repeated after a failure in between. Fails if there is another one, or the owner has `unfinished_max`
/// unfinished ones.
pub(crate) async fn create(
    tx: &mut Transaction<'_, Postgres>,
    caller: &Caller,
    id: Option<String>,
    now: DateTime<Utc>,
    ttl: TimeDelta,
    unfinished_max: u32,
) -> Result<Project, Error> {
    let new = Project {
        id: id.unwrap_or_else(|| Uuid::now_v7().to_string()),
        tenant: caller.tenant.clone(),
        owner: domain::owner(caller),
        token: Uuid::new_v4(),
        run: None,
        created_at: now,
        expires_at: now + ttl,
        finished: None,
    };
    if store::insert(tx, &new).await? {
        // With this one. Requests at the same time do not see each other, so there may be some more.
        let limit = i64::from(unfinished_max) + 1;
        return if store::count_unfinished(tx, &new.owner, now, limit).await? < limit {
            Ok(new)
        } else {
            Err(Error::TooManyProjects(unfinished_max))
        };
    }
    let existing = store::find(tx, &new.id).await?.ok_or(Error::Contended)?;
    let is_same = existing.owner == new.owner && existing.run.is_none() && existing.finished.is_none();
    if is_same { Ok(existing) } else { Err(Error::Exists) }
}

/// Initialises the counts of a project that was created.
pub(crate) async fn initialise(progress: &Progress, id: &str) -> Result<(), Error> {
    let project = reload(progress, id).await?;
    if project.finished.is_none() {
        initialised(progress, &project).await?;
    }
    Ok(())
}

/// The current or final counts of a project. Final ones are archived. Fails if they are lost.
pub(crate) async fn read(progress: &Progress, project: Arc<Project>) -> Result<(Arc<Project>, Reading), Error> {
    let mut project = project;
    for attempt in 1..=ATTEMPTS {
        if let Some(finished) = project.finished {
            return Ok((project, Reading::of(finished.snapshot)));
        }
        let Some(counts) = initialised(progress, &project).await? else {
            project = reload(progress, &project.id).await?;
            continue;
        };
        match progress.state.read_one(&counts).await? {
            Some(reading) if reading.snapshot.status.is_final() => {
                project = completion::ensure_archived(progress, &counts, &reading.snapshot, reading.ended).await?;
                continue;
            }
            Some(reading) => return Ok((project, reading)),
            None => {}
        }
        let current = reload(progress, &project.id).await?;
        if attempt > 1 && current.token == counts.token && current.finished.is_none() {
            return Err(lost(progress, &current));
        }
        project = current;
    }
    Err(Error::Contended)
}

/// The projects of the caller, or all of them for an operator, newest first. The counts are None where they are lost.
pub(crate) async fn list(
    progress: &Progress,
    caller: &Caller,
    before: Option<(DateTime<Utc>, String)>,
    limit: u32,
) -> Result<Vec<(Project, Option<Reading>)>, Error> {
    let owner = (!caller.is_operator()).then(|| domain::owner(caller));
    let projects = store::list(&mut *progress.db.acquire().await?, owner.as_deref(), before, limit).await?;
    let unfinished: Vec<Counts> =
        projects.iter().filter(|project| project.finished.is_none()).filter_map(Counts::of).collect();
    let mut readings =
        if unfinished.is_empty() { Vec::new() } else { progress.state.read(&unfinished, false).await? }.into_iter();
    let with_counts = |project: Project| {
        let archived = project.finished.map(|finished| Reading::of(finished.snapshot));
        let reading = match archived {
            // Those that cannot be read are shown like lost ones; a request for the project itself says why.
            None if project.run.is_some() => readings.next().and_then(Result::ok).flatten(),
            archived => archived,
        };
        (project, reading)
    };
    Ok(projects.into_iter().map(with_counts).collect())
}

/// The change that a request asks for, and its conditions.
pub(crate) struct Requested {
    pub(crate) change: Change,
    pub(crate) if_match: IfMatch,
    /// Identifies the request, if its caller has given it a key.
    pub(crate) request: Option<String>,
}

impl Requested {
    /// The status and the total after the change. Fails if the status does not allow it, or the caller knows another version.
    fn target(&self, project: &Project, snapshot: &Snapshot) -> Result<Target, Error> {
        let stale = |problem| Error::Stale(Box::new(problem));
        self.if_match.check(view::version(project, snapshot), project.created_at).map_err(stale)?;
        Ok(snapshot.change(self.change)?)
    }
}

/// Changes the total and the status of a project whose counts are in Redis. Fails if the status does not allow it. A request that
/// had its effect before has no other, even if its response was not stored.
pub(crate) async fn change(
    progress: &Progress,
    redis: &RedisState,
    project: Arc<Project>,
    requested: &Requested,
) -> Result<(Arc<Project>, Reading), Error> {
    let (mut project, request) = (project, requested.request.as_deref());
    for _ in 0..ATTEMPTS {
        let (current, reading) = read(progress, project).await?;
        let counts = Counts::of(&current);
        if let (Some(counts), Some(request)) = (&counts, request)
            && redis.has_applied(counts, request).await?
        {
            return Ok((current, reading));
        }
        let to = requested.target(&current, &reading.snapshot)?;
        let is_same = to == reading.snapshot.target();
        if current.finished.is_some() || (is_same && request.is_none()) {
            return Ok((current, reading));
        }
        // Initialised since it was cached.
        let Some(counts) = counts else {
            project = reload(progress, &current.id).await?;
            continue;
        };
        match redis.replace(&counts, request, &reading.snapshot, to).await? {
            Replaced::Changed(changed) if changed.snapshot.status.is_final() => {
                let archiving = completion::ensure_archived(progress, &counts, &changed.snapshot, changed.ended);
                let current = archiving.await?;
                return Ok((current, Reading::of(changed.snapshot)));
            }
            Replaced::Changed(changed) => return Ok((current, Reading { snapshot: changed.snapshot, ..reading })),
            Replaced::Conflict => project = current,
            Replaced::Lost => project = reload(progress, &current.id).await?,
        }
    }
    Err(Error::Contended)
}

/// The same for counts in PostgreSQL, in the caller's transaction: the effect commits with the response, and so does the end of the
/// project.
pub(crate) async fn change_in(
    tx: &mut Transaction<'_, Postgres>,
    progress: &Progress,
    postgres: &PostgresState,
    id: &str,
    requested: &Requested,
) -> Result<(Project, Reading), Error> {
    for _ in 0..ATTEMPTS {
        let current = store::find(tx, id).await?.ok_or(Error::NotFound)?;
        let reading = match (current.finished, Counts::of(&current)) {
            (Some(finished), _) => Some(Reading::of(finished.snapshot)),
            (None, Some(counts)) => postgres.read_in(tx, &counts).await?,
            (None, None) => {
                initialised_in(progress, tx, id).await?;
                continue;
            }
        };
        let reading = reading.ok_or_else(|| lost(progress, &current))?;
        let to = requested.target(&current, &reading.snapshot)?;
        let is_same = to == reading.snapshot.target();
        let Some(counts) = Counts::of(&current).filter(|_| current.finished.is_none() && !is_same) else {
            return Ok((current, reading));
        };
        if let Replaced::Changed(changed) = postgres.replace_in(tx, &counts, &reading.snapshot, to).await? {
            if !changed.snapshot.status.is_final() {
                return Ok((current, Reading { snapshot: changed.snapshot, ..reading }));
            }
            completion::archive_in(tx, &current, &changed.snapshot, changed.ended).await?;
            let current = store::find(tx, id).await?.ok_or(Error::NotFound)?;
            return Ok((current, Reading::of(changed.snapshot)));
        }
    }
    Err(Error::Contended)
}

/// Initialises lost counts again. Fails if they are not lost, so that two requests cannot discard each other's items.
pub(crate) async fn restart(
    progress: &Progress,
    project: Arc<Project>,
    now: DateTime<Utc>,
    ttl: TimeDelta,
) -> Result<(Arc<Project>, Reading), Error> {
    let current = reload(progress, &project.id).await?;
    match read(progress, current.clone()).await {
        Err(Error::Lost(_) | Error::Expired(_)) => {}
        Ok(_) => return Err(Error::NotLost),
        Err(other) => return Err(other),
    }
    let replaced = {
        let mut db = progress.db.acquire().await?;
        store::replace_token(&mut db, &current.id, current.token, Uuid::new_v4(), now + ttl).await?
    };
    if !replaced {
        return Err(Error::NotLost);
    }
    let current = reload(progress, &current.id).await?;
    read(progress, current).await
}
