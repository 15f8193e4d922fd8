//! The audit trail: the requests that a key of the tenant `main` made for another tenant, by the header `Pillarbox-Tenant`.
//!
//! Owns the table `pillarbox_admin.audit`. The line of a request that changes something is committed before the request is
//! processed, so a change without a line does not exist, not even after a crash. That commit does not wait for the disk: the
//! write-ahead log is one sequence, so when the change itself is durable, so is the earlier line. Lines of reads and the
//! statuses of responses are written in the background; a crash may lose the last of them. A line whose status is missing
//! belongs to a request that was in progress at a crash.

pub(crate) mod http;
pub(crate) mod store;

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use axum::response::Response;
use axum::routing::Route;
use chrono::{DateTime, Utc};
use http_kit::auth::ActsForTenant;
use http_kit::problem::Problem;
use pillarbox::database::{Database, time};
use pillarbox::log::Tenant;
use runtime::clock::Clock;
use runtime::trace::TraceContext;
use runtime::worker::Round;
use serde::Serialize;
use sqlx::PgPool;
use tokio::sync::{mpsc, oneshot};
use tower::Service;
use utoipa::ToSchema;
use uuid::Uuid;

/// How many lines may wait to be written. Beyond it, requests that act for tenants wait.
const QUEUE_MAX: usize = 10_000;
/// How many lines one statement writes.
const BATCH_MAX: usize = 1_000;
/// How long lines are collected for which no request waits.
const LINGER: Duration = Duration::from_millis(200);
/// The pause before lines are written again that could not be written.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// How many lines retention deletes at a time.
const DELETED_MAX: i64 = 10_000;

/// A request that acted for a tenant.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema, sqlx::FromRow)]
pub struct AuditLine {
    pub id: Uuid,
    pub at: DateTime<Utc>,
    /// The API key that sent the request; zeros stand for the key of the setting `admin_key`.
    pub key_id: Uuid,
    #[sqlx(try_from = "String")]
    #[schema(value_type = http_kit::openapi::TenantName)]
    pub tenant: Tenant,
    #[schema(example = "POST")]
    pub method: String,
    /// The pattern of the route, without the ids of the request.
    #[schema(example = "/hub/v1/subscribers/{id}/pause")]
    pub route: String,
    /// The status of the response. Absent: the request is in progress, or its process ended before it responded.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u16>)]
    pub status: Option<i16>,
    pub trace_id: String,
}

/// What the writer writes.
enum Entry {
    /// A new line. `written` is notified when it is committed.
    Line {
        line: AuditLine,
        written: Option<oneshot::Sender<bool>>,
    },
    Status {
        id: Uuid,
        status: i16,
    },
}

/// Records the requests of one process. The writer ends when it is dropped.
pub struct AuditTrail {
    clock: Clock,
    entries: mpsc::Sender<Entry>,
}

impl AuditTrail {
    /// Returns the trail, and the loop that writes it.
    pub(crate) fn new(db: &Database, clock: Clock) -> (AuditTrail, impl Future<Output = ()> + use<>) {
        let (entries, received) = mpsc::channel(QUEUE_MAX);
        (AuditTrail { clock, entries }, write_entries(db.pool().clone(), received))
    }

    /// Commits the line of a request that is about to change something. Fails if it cannot be written.
    async fn record_change(&self, line: AuditLine) -> Result<(), Problem> {
        let unavailable = || Problem::unavailable(&"the audit trail cannot be written");
        let (written, confirmed) = oneshot::channel();
        let entry = Entry::Line { line, written: Some(written) };
        self.entries.send(entry).await.map_err(|_| unavailable())?;
        match confirmed.await {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => Err(unavailable()),
        }
    }

    async fn record(&self, entry: Entry) {
        // Fails only when the process stops.
        let _ = self.entries.send(entry).await;
    }
}

/// Passes the request on, and records it if it acts for a tenant. It runs after the authentication.
pub async fn audit(trail: &AuditTrail, request: Request, mut route: Route) -> Result<Response, Problem> {
    let mut respond = async |request| route.call(request).await.unwrap_or_else(|never: Infallible| match never {});
    let acting = request.extensions().get::<ActsForTenant>().cloned();
    let Some(ActsForTenant { principal, tenant }) = acting else { return Ok(respond(request).await) };
    let pattern = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    let mut line = AuditLine {
        id: Uuid::now_v7(),
        at: trail.clock.now(),
        key_id: principal.id(),
        tenant,
        method: request.method().to_string(),
        route: pattern,
        status: None,
        trace_id: TraceContext::current().map(|trace| trace.trace_id()).unwrap_or_default(),
    };
    let is_read = request.method().is_safe();
    if !is_read {
        trail.record_change(line.clone()).await?;
    }
    let response = respond(request).await;
    let status = response.status().as_u16() as i16; // from 100 to 999
    if is_read {
        line.status = Some(status);
        trail.record(Entry::Line { line, written: None }).await;
    } else {
        trail.record(Entry::Status { id: line.id, status }).await;
    }
    Ok(response)
}

/// Writes entries in batches until all senders are dropped. A change waits for its line, so a batch with such a line is written
/// at once; other entries are collected for a moment.
async fn write_entries(db: PgPool, mut entries: mpsc::Receiver<Entry>) {
    let mut batch = Batch::default();
    loop {
        let is_open = batch.receive(&mut entries).await;
        while !batch.is_empty() {
            match batch.write(&db).await {
                Ok(()) => batch = Batch::default(),
                Err(error) => {
                    tracing::warn!(%error, "the audit trail cannot be written; changes on behalf of tenants are refused");
                    batch.refuse_changes();
                    if !is_open {
                        return;
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
        if !is_open {
            return;
        }
    }
}

#[derive(Default)]
struct Batch {
    lines: Vec<AuditLine>,
    waiting: Vec<(Uuid, oneshot::Sender<bool>)>,
    statuses: Vec<(Uuid, i16)>,
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.statuses.is_empty()
    }

    fn is_full(&self) -> bool {
        self.lines.len() + self.statuses.len() >= BATCH_MAX
    }

    fn add(&mut self, entry: Entry) {
        match entry {
            Entry::Line { line, written } => {
                self.waiting.extend(written.map(|written| (line.id, written)));
                self.lines.push(line);
            }
            Entry::Status { id, status } => self.statuses.push((id, status)),
        }
    }

    /// Collects entries. Returns false if there will be no more.
    async fn receive(&mut self, entries: &mut mpsc::Receiver<Entry>) -> bool {
        let Some(first) = entries.recv().await else { return false };
        self.add(first);
        let until = tokio::time::Instant::now() + LINGER;
        while !self.is_full() {
            let next = if self.waiting.is_empty() {
                tokio::time::timeout_at(until, entries.recv()).await.ok()
            } else {
                // What is there already is written along.
                entries.try_recv().ok().map(Some)
            };
            match next {
                Some(Some(entry)) => self.add(entry),
                Some(None) => return false,
                None => break,
            }
        }
        true
    }

    async fn write(&mut self, db: &PgPool) -> Result<(), sqlx::Error> {
        let mut db = db.acquire().await?;
        if !self.lines.is_empty() {
            store::insert(&mut db, &self.lines).await?;
            self.lines.clear();
        }
        for (_, written) in self.waiting.drain(..) {
            // Fails if the caller has disconnected.
            let _ = written.send(true);
        }
        if !self.statuses.is_empty() {
            store::set_statuses(&mut db, &self.statuses).await?;
            self.statuses.clear();
        }
        Ok(())
    }

    /// Refuses the changes that wait. Their lines are dropped: nothing happened.
    fn refuse_changes(&mut self) {
        for (id, written) in self.waiting.drain(..) {
            self.lines.retain(|line| line.id != id);
            let _ = written.send(false);
        }
    }
}

/// Deletes lines that are older than `days`, by the database's time.
pub(crate) async fn remove_old(db: &PgPool, days: u32) -> Result<Round, sqlx::Error> {
    let mut db = db.acquire().await?;
    let before = time::now(&mut db).await? - chrono::TimeDelta::days(days.into());
    let deleted = store::delete(&mut db, before, DELETED_MAX).await?;
    Ok(if deleted < DELETED_MAX as u64 { Round::Idle } else { Round::Busy })
}
