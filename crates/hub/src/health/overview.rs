//! What operators see of all webhooks at a glance. The cost does not depend on the number of messages.

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::database::{Database, time};
use uuid::Uuid;

use crate::health::counts::{Percentiles, percentiles};
use crate::health::store;
use crate::health::totals::TotalCounts;

/// The times are those of this many minutes.
const LATENCY_MINUTES: i32 = 5;
/// Dead letters are counted up to this number.
pub const DEAD_LETTERS_COUNTED_MAX: i64 = 10_000;
/// Subscribers of each kind that are named.
const SUBSCRIBERS_MAX: i64 = 20;
/// A subscriber that fails for a shorter time may recover by itself.
const FAILING_FOR: TimeDelta = TimeDelta::minutes(1);

/// The totals of all webhooks.
#[derive(Debug, Clone, PartialEq)]
pub struct WebhookTotals {
    pub delivered: i64,
    /// Attempts that failed, whether they are retried or were the last.
    pub failed_attempts: i64,
    /// By tenant, most first. Counted up to [`DEAD_LETTERS_COUNTED_MAX`] in all.
    pub dead_letters: Vec<(String, i64)>,
    /// The response times below which 50 and 99 percent of the responses of the last minutes arrived, in milliseconds.
    pub latency_ms: Option<(f64, f64)>,
    /// The same for the time from the post of an event to its delivery.
    pub end_to_end_ms: Option<(f64, f64)>,
}

impl WebhookTotals {
    /// The dead letters of all tenants.
    pub fn dead_letter_count(&self) -> i64 {
        self.dead_letters.iter().map(|(_, count)| count).sum()
    }
}

/// A subscriber that needs an operator.
#[derive(Debug, Clone)]
pub struct SubscriberWithIssue {
    pub id: Uuid,
    pub tenant: String,
    pub name: String,
    pub issue: Issue,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Issue {
    /// The hub has switched it off, for this reason.
    Disabled(String),
    /// All its attempts have failed since this time.
    FailingSince(DateTime<Utc>),
}

/// Returns the totals. A process adds its attempts once a second.
pub async fn webhook_totals(db: &Database) -> sqlx::Result<WebhookTotals> {
    let mut db = db.acquire().await?;
    let TotalCounts { attempts, end_to_end } = store::overview::attempts(&mut db, LATENCY_MINUTES).await?;
    let p50_and_p99 = |times: Percentiles| (times.p50, times.p99);
    Ok(WebhookTotals {
        delivered: attempts.delivered,
        failed_attempts: attempts.failed + attempts.dead,
        dead_letters: store::overview::count_dead_letters(&mut db, DEAD_LETTERS_COUNTED_MAX).await?,
        latency_ms: attempts.percentiles().map(p50_and_p99),
        end_to_end_ms: percentiles(&end_to_end).map(p50_and_p99),
    })
}

/// Returns subscribers that were switched off and subscribers that fail, some of each.
pub async fn subscribers_with_issues(db: &Database) -> sqlx::Result<Vec<SubscriberWithIssue>> {
    let mut db = db.acquire().await?;
    let failing_before = time::now(&mut db).await? - FAILING_FOR;
    let found = store::overview::subscribers_with_issues(&mut db, failing_before, SUBSCRIBERS_MAX).await?;
    let subscriber = |found: store::overview::SubscriberWithIssue| {
        let issue = match (found.failing_since, found.inactive_reason) {
            (Some(since), _) => Issue::FailingSince(since),
            (None, reason) => Issue::Disabled(reason.unwrap_or_default()),
        };
        SubscriberWithIssue { id: found.id, tenant: found.tenant, name: found.name, issue }
    };
    Ok(found.into_iter().map(subscriber).collect())
}
