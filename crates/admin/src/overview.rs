//! The installation at a glance: totals that grow, what was given up, and what an operator should look at.
//!
//! A page may poll it every second or two, from several browsers. So nothing is counted without a bound, and each
//! process loads the totals at most once a second and what needs more work every five seconds.

mod findings;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use chrono::{DateTime, Utc};
use http_kit::auth::Operator;
use http_kit::extract::Json;
use http_kit::problem::Problem;
use hub::{SubscriberWithIssue, WebhookTotals};
use notify::GivenUp;
use pillarbox::database::Database;
use pillarbox::operations::status::{self, ConsumerStatus};
use pillarbox::operations::{dead_letters, status::LogTotals};
use serde::Serialize;
use tokio::sync::Mutex;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Administration;
use findings::Finding;

/// How old the totals are at most.
const TOTALS_TIME: Duration = Duration::from_secs(1);
/// How old the state of consumers and subscribers is at most.
const STATE_TIME: Duration = Duration::from_secs(5);

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(show))
}

/// What was loaded last. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct OverviewCache {
    totals: Arc<Cached<Totals>>,
    state: Arc<Cached<InstallationState>>,
}

/// A value that is loaded again when it is too old. The lock makes concurrent requests wait for one load.
struct Cached<T>(Mutex<Option<(Instant, Arc<T>)>>);

impl<T> Default for Cached<T> {
    fn default() -> Cached<T> {
        Cached(Mutex::new(None))
    }
}

impl<T> Cached<T> {
    async fn get(&self, time_max: Duration, load: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<Arc<T>> {
        let mut cached = self.0.lock().await;
        if let Some((loaded_at, value)) = &*cached
            && loaded_at.elapsed() < time_max
        {
            return Ok(value.clone());
        }
        let value = Arc::new(load.await?);
        *cached = Some((Instant::now(), value.clone()));
        Ok(value)
    }
}

/// What grows with the traffic, from counters.
struct Totals {
    at: DateTime<Utc>,
    log: LogTotals,
    webhooks: WebhookTotals,
    given_up: GivenUp,
    dead_of_consumers: i64,
}

/// What an operator may have to act on.
struct InstallationState {
    consumers: Vec<ConsumerStatus>,
    subscribers: Vec<SubscriberWithIssue>,
}

/// The installation at a glance.
#[derive(Debug, Serialize, ToSchema)]
struct Overview {
    /// The time of the totals.
    at: DateTime<Utc>,
    /// Messages that were posted to the log. A transaction that rolled back counts too, as far as it had posted.
    posted_total: i64,
    /// Webhooks that were delivered.
    delivered_total: i64,
    /// Attempts to deliver a webhook that failed, whether they were retried or not.
    failed_attempts_total: i64,
    dead_letters: DeadLetterCounts,
    /// The response times of all endpoints in the last five minutes. Absent: there was no attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_ms: Option<LatencyView>,
    /// The time from the post of an event to the end of its delivery, of the deliveries of the last five minutes; 60,000 at
    /// most. Without replays and retried dead letters. Absent: there was no delivery.
    #[serde(skip_serializing_if = "Option::is_none")]
    end_to_end_ms: Option<LatencyView>,
    /// What an operator should look at, the most severe first.
    findings: Vec<Finding>,
}

/// What was given up and can be retried. The counts end at 10,000 (e-mails and notifications: 100,000).
#[derive(Debug, Serialize, ToSchema)]
struct DeadLetterCounts {
    webhooks: i64,
    consumers: i64,
    mail: i64,
    notifications: i64,
}

/// The times below which half and 99 percent are.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Latency)]
struct LatencyView {
    p50: f64,
    p99: f64,
}

impl From<(f64, f64)> for LatencyView {
    fn from((p50, p99): (f64, f64)) -> LatencyView {
        LatencyView { p50, p99 }
    }
}

impl OverviewCache {
    async fn load(&self, db: &Database, now: DateTime<Utc>) -> sqlx::Result<(Arc<Totals>, Arc<InstallationState>)> {
        let totals = self.totals.get(TOTALS_TIME, load_totals(db, now)).await?;
        Ok((totals, self.state.get(STATE_TIME, load_state(db)).await?))
    }
}

async fn load_totals(db: &Database, at: DateTime<Utc>) -> sqlx::Result<Totals> {
    Ok(Totals {
        at,
        log: status::log_totals(&mut *db.acquire().await?).await?,
        webhooks: hub::webhook_totals(db).await?,
        given_up: notify::given_up(db).await?,
        dead_of_consumers: dead_letters::count_up_to(&mut *db.acquire().await?, hub::DEAD_LETTERS_COUNTED_MAX).await?,
    })
}

async fn load_state(db: &Database) -> sqlx::Result<InstallationState> {
    let consumers = status::consumers(&mut *db.acquire().await?).await?;
    Ok(InstallationState { consumers, subscribers: hub::subscribers_with_issues(db).await? })
}

/// Show the installation at a glance
///
/// Totals, what was given up, and what an operator should look at. It is cheap at any size, so that a page can poll it; it is
/// up to a second old, and its findings up to five seconds.
#[utoipa::path(get, path = "/admin/v1/overview", operation_id = "getOverview", tag = "operator", security(("bearer" = [])),
    responses((status = 200, body = Overview)))]
async fn show(State(admin): State<Arc<Administration>>, _: Operator) -> Result<Json<Overview>, Problem> {
    let now = admin.clock.now();
    let loaded = admin.overview.load(&admin.db, now).await;
    let (totals, state) = loaded.map_err(|error| http_kit::database::problem(&error))?;
    let dead_letters = DeadLetterCounts {
        webhooks: totals.webhooks.dead_letter_count(),
        consumers: totals.dead_of_consumers,
        mail: totals.given_up.mails,
        notifications: totals.given_up.notifications,
    };
    let mut findings = findings::of_checks(&admin.health.report());
    findings.extend(findings::of_consumers(&state.consumers, &admin.optional_routes));
    findings.extend(findings::of_subscribers(&state.subscribers, now));
    findings.extend(findings::of_dead_letters(&dead_letters, &totals.webhooks.dead_letters));
    findings.sort_by_key(|finding| finding.severity);
    Ok(Json(Overview {
        at: totals.at,
        posted_total: totals.log.posted,
        delivered_total: totals.webhooks.delivered,
        failed_attempts_total: totals.webhooks.failed_attempts,
        dead_letters,
        latency_ms: totals.webhooks.latency_ms.map(LatencyView::from),
        end_to_end_ms: totals.webhooks.end_to_end_ms.map(LatencyView::from),
        findings,
    }))
}
