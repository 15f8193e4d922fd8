//! JSON of the responses.

use chrono::{DateTime, TimeDelta, Utc};
use http::HeaderValue;
use http_kit::etag;
use http_kit::event_stream::StreamEvent;
use serde::Serialize;
use utoipa::ToSchema;

use crate::counts::{Changed, Reading};
use crate::domain::{Project, Snapshot, Status, estimated_end};

/// The name of the events of a stream.
const EVENT: &str = "progress";
/// The name of the last event of a stream whose counts are lost.
const LOST_EVENT: &str = "progress-lost";

#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Project)]
pub(crate) struct ProjectView {
    #[schema(example = "crawl-42")]
    id: String,
    status: Status,
    /// The number of items; 0 if it is not known yet.
    total: i64,
    /// The number of items that are done, including the failed ones.
    done: i64,
    /// How many of them have failed.
    errors: i64,
    /// Items per second, recently.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<f64>,
    /// When all items will be done, at this rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    eta: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    /// When the counts of an unfinished project expire, and a finished one is deleted.
    expires_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_at: Option<DateTime<Utc>>,
}

/// The times that a view of a project depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ViewTimes {
    pub(crate) now: DateTime<Utc>,
    /// For how long a finished project is read.
    pub(crate) retention: TimeDelta,
}

impl ProjectView {
    pub(crate) fn new(project: &Project, reading: &Reading, ViewTimes { now, retention }: ViewTimes) -> ProjectView {
        let Reading { snapshot, rate, .. } = reading;
        let per_second = rate.map(|rate| rate.per_second(now)).filter(|_| !snapshot.status.is_final());
        ProjectView {
            id: project.id.clone(),
            status: snapshot.status,
            total: snapshot.total,
            done: snapshot.done,
            errors: snapshot.errors,
            rate: per_second.map(|rate| (rate * 100.0).round() / 100.0),
            eta: per_second.and_then(|rate| estimated_end(snapshot, rate, now)),
            created_at: project.created_at,
            expires_at: project.readable_until(retention),
            finished_at: project.finished.map(|finished| finished.at),
        }
    }
}

/// A project in a list.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ProjectListItem)]
pub(crate) struct ProjectItem {
    #[schema(example = "crawl-42")]
    id: String,
    /// Absent, like the numbers, if the counts are lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    done: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<i64>,
    created_at: DateTime<Utc>,
    expires_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_at: Option<DateTime<Utc>>,
}

impl ProjectItem {
    /// `retention`: for how long a finished project is read.
    pub(crate) fn new(project: Project, reading: Option<Reading>, retention: TimeDelta) -> ProjectItem {
        // A project whose counts are not initialised yet has the initial ones.
        let initial = project.run.is_none().then_some(Snapshot::INITIAL);
        let snapshot = reading.map(|reading| reading.snapshot).or(initial);
        ProjectItem {
            expires_at: project.readable_until(retention),
            id: project.id,
            status: snapshot.map(|snapshot| snapshot.status),
            total: snapshot.map(|snapshot| snapshot.total),
            done: snapshot.map(|snapshot| snapshot.done),
            errors: snapshot.map(|snapshot| snapshot.errors),
            created_at: project.created_at,
            finished_at: project.finished.map(|finished| finished.at),
        }
    }
}

/// The counts after items were marked.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MarkedItems)]
pub(crate) struct MarkedView {
    /// How many of the items were counted: the others had been counted before, or the project has finished.
    counted: i64,
    status: Status,
    total: i64,
    done: i64,
    errors: i64,
}

impl From<Changed> for MarkedView {
    fn from(changed: Changed) -> MarkedView {
        let Snapshot { status, total, done, errors } = changed.snapshot;
        MarkedView { counted: changed.counted, status, total, done, errors }
    }
}

/// Identifies what a request can change: the status and the total, of one initialisation. Items do not change it, so that workers
/// do not disturb who sets the total.
pub(crate) fn version(project: &Project, snapshot: &Snapshot) -> i64 {
    let Snapshot { status, total, .. } = snapshot;
    let digest = runtime::secret::digest(&format!("{}-{status}-{total}", project.token.simple()));
    let [a, b, c, d, e, f, g, ..] = digest;
    i64::from_be_bytes([0, a, b, c, d, e, f, g])
}

/// The tag of a project as a client sees it.
pub(crate) fn tag(project: &Project, snapshot: &Snapshot, view: &ProjectView) -> HeaderValue {
    let digest = etag::of_content(&serde_json::to_string(view).unwrap_or_default());
    let extra = digest.to_str().unwrap_or_default().trim_matches('"').to_owned();
    etag::with_extra(version(project, snapshot), project.created_at, extra)
}

/// Identifies the counts of a project. A client that has seen these needs no other event.
pub(crate) fn event_id(project: &Project, snapshot: &Snapshot) -> String {
    let Snapshot { status, total, done, errors } = snapshot;
    format!("{}-{status}-{total}-{done}-{errors}", project.token.simple())
}

/// The event of a stream that shows these counts.
pub(crate) fn event(project: &Project, reading: &Reading, times: ViewTimes) -> StreamEvent {
    // A struct of plain values always serializes.
    let data = serde_json::to_string(&ProjectView::new(project, reading, times)).unwrap_or_default();
    StreamEvent { id: event_id(project, &reading.snapshot), name: EVENT, data }
}

/// The last event of a stream whose counts are lost.
pub(crate) fn lost_event(project: &Project, detail: &str) -> StreamEvent {
    let data = serde_json::json!({"id": project.id, "detail": detail}).to_string();
    StreamEvent { id: format!("{}-lost", project.token.simple()), name: LOST_EVENT, data }
}
