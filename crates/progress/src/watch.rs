//! The projects that clients of this process watch. One loop reads the counts of all of them, however many clients there are,
//! and ends with the last watcher.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use http_kit::event_stream::StreamEvent;
use tokio::sync::watch;

use crate::counts::Counts;
use crate::domain::Project;
use crate::error::Error;
use crate::flow::{self, project};
use crate::{Progress, view};

/// Time between two reads.
const POLL_PAUSE: Duration = Duration::from_millis(250);

/// The last state of a watched project: the event that shows it, and whether it is the last one.
type Observed = Option<(Arc<StreamEvent>, bool)>;

#[derive(Default)]
pub(crate) struct Watched(Mutex<HashMap<String, watch::Sender<Observed>>>);

impl Watched {
    /// A receiver of what changes from now on. The first one starts the loop.
    fn subscribe(&self, progress: &Arc<Progress>, id: &str) -> watch::Receiver<Observed> {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let starts = watched.is_empty();
        let receiver = match watched.entry(id.to_owned()) {
            Entry::Occupied(entry) => entry.get().subscribe(),
            Entry::Vacant(entry) => entry.insert(watch::Sender::new(None)).subscribe(),
        };
        drop(watched);
        if starts {
            let progress = progress.clone();
            tokio::spawn(async move { poll(&progress).await });
        }
        receiver
    }

    /// The projects that are being watched. The others are removed.
    fn current(&self) -> Vec<String> {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|_, sender| sender.receiver_count() > 0);
        watched.keys().cloned().collect()
    }

    fn publish(&self, id: &str, event: StreamEvent, is_last: bool) {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = watched.get(id) {
            sender.send_if_modified(|observed| {
                let is_new = observed.as_ref().is_none_or(|(old, _)| old.id != event.id);
                if is_new {
                    *observed = Some((Arc::new(event), is_last));
                }
                is_new
            });
        }
    }
}

/// The events of a project: its state now, unless the client has seen it, and every change. A client that is slow, or was cut
/// off, gets the newest state and not those in between. The stream ends after the final state.
///
/// Returns None if the client has seen the final state.
pub(crate) async fn events(
    progress: &Arc<Progress>,
    project: Arc<Project>,
    last_event_id: Option<String>,
) -> Result<Option<impl Stream<Item = Vec<StreamEvent>> + Send + use<>>, Error> {
    // First, so that no change between the read and the subscription is missed.
    let receiver = progress.watched.subscribe(progress, &project.id);
    let (project, reading) = project::read(progress, project).await?;
    let first = view::event(&project, &reading, progress.view_times());
    let is_last = project.finished.is_some();
    let is_seen = last_event_id.as_deref() == Some(&first.id);
    if is_seen && is_last {
        return Ok(None);
    }
    let (seen, first) = if is_seen { (Some(first.id), None) } else { (None, Some((Arc::new(first), is_last))) };
    Ok(Some(stream::unfold(Some((receiver, first, seen)), next_event)))
}

type Position = (watch::Receiver<Observed>, Observed, Option<String>);

/// The next event that the client has not seen, and the position after it; None as the position after the last event.
async fn next_event(position: Option<Position>) -> Option<(Vec<StreamEvent>, Option<Position>)> {
    let (mut receiver, mut observed, seen) = position?;
    loop {
        match observed.take() {
            Some((event, is_last)) if seen.as_ref() != Some(&event.id) => {
                let rest = (!is_last).then(|| (receiver, None, Some(event.id.clone())));
                return Some((vec![StreamEvent::clone(&event)], rest));
            }
            Some((_, is_last)) if is_last => return None,
            Some(_) | None => {}
        }
        receiver.changed().await.ok()?;
        observed = receiver.borrow_and_update().clone();
    }
}

/// Reads all watched projects again and again, until none is watched.
async fn poll(progress: &Progress) {
    loop {
        tokio::time::sleep(POLL_PAUSE).await;
        let ids = progress.watched.current();
        if ids.is_empty() {
            return;
        }
        // While the server is away, the streams stay open and silent; readiness names it.
        if let Err(error) = read_all(progress, &ids).await {
            tracing::debug!(%error, "the watched projects could not be read");
        }
    }
}

/// Reads all of them. One that fails does not stop the streams of the others.
async fn read_all(progress: &Progress, ids: &[String]) -> Result<(), Error> {
    let (mut projects, mut counts) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
    for id in ids {
        let project = match flow::find(progress, id).await {
            Ok(project) => project,
            // Deleted after its retention.
            Err(Error::NotFound) => continue,
            Err(other) => return Err(other),
        };
        match Counts::of(&project).filter(|_| project.finished.is_none()) {
            Some(found) => {
                projects.push(project);
                counts.push(found);
            }
            None => report(read_one(progress, project).await),
        }
    }
    let readings = progress.state.read(&counts, false).await?;
    for (project, reading) in projects.into_iter().zip(readings) {
        match reading {
            // A final state is read again, and archived.
            Ok(Some(reading)) if !reading.snapshot.status.is_final() => {
                let event = view::event(&project, &reading, progress.view_times());
                progress.watched.publish(&project.id, event, false);
            }
            Ok(_) => report(read_again(progress, &project.id).await),
            Err(error) => report(Err(error.into())),
        }
    }
    Ok(())
}

/// Logs why a project could not be read.
fn report(read: Result<(), Error>) {
    if let Err(error) = read {
        tracing::debug!(%error, "a watched project could not be read");
    }
}

async fn read_again(progress: &Progress, id: &str) -> Result<(), Error> {
    read_one(progress, flow::reload(progress, id).await?).await
}

/// Reads a project whose counts may be final, lost, or of another token by now.
async fn read_one(progress: &Progress, project: Arc<Project>) -> Result<(), Error> {
    match project::read(progress, project.clone()).await {
        Ok((project, reading)) => {
            // A final state is archived, so that it is shown with the time of its end.
            let is_last = project.finished.is_some();
            progress.watched.publish(&project.id, view::event(&project, &reading, progress.view_times()), is_last);
        }
        Err(error @ (Error::Lost(_) | Error::Expired(_))) => {
            progress.watched.publish(&project.id, view::lost_event(&project, &error.to_string()), true);
        }
        Err(other) => return Err(other),
    }
    Ok(())
}
