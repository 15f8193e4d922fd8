//! Quotas of a tenant: how many subscribers it may have, and how many hub messages may wait for them.
//!
//! Waiting messages are counted in the background, by processes with the role `maintain`. Processes with the role `api`
//! read the counts once a second, so that ingest asks no database. So a tenant can exceed its quota by what it posts within
//! a few seconds.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use http::StatusCode;
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use runtime::worker::Round;
use sqlx::PgPool;

use crate::tenants::store;

/// When a refused producer should try again.
const RETRY_AFTER: Duration = Duration::from_secs(30);
/// The pause between two counts. Counting takes at most a twentieth of the time, however many messages wait.
const COUNT_PAUSE_MIN: Duration = Duration::from_secs(2);
const COUNT_PAUSE_FACTOR: u32 = 20;

/// The tenants with too many waiting messages, as this process knows them.
#[derive(Debug, Clone)]
pub(crate) struct WaitingQuota {
    max: i64,
    /// The number of waiting messages of each tenant that has too many.
    exceeded: Arc<RwLock<HashMap<String, i64>>>,
}

impl WaitingQuota {
    pub(crate) fn new(max: u64) -> WaitingQuota {
        WaitingQuota { max: i64::try_from(max).unwrap_or(i64::MAX), exceeded: Arc::default() }
    }

    /// Fails if the tenant has too many waiting messages.
    pub(crate) fn check(&self, tenant: &Tenant) -> Result<(), Problem> {
        let exceeded = self.exceeded.read().unwrap_or_else(PoisonError::into_inner);
        match exceeded.get(tenant.as_str()) {
            Some(waiting) => Err(too_many_waiting(tenant, *waiting, self.max)),
            None => Ok(()),
        }
    }

    /// Loads the tenants with too many waiting messages.
    pub(crate) async fn refresh(&self, db: &PgPool) -> Result<Round, sqlx::Error> {
        let exceeded = store::backlog::above(&mut *db.acquire().await?, self.max).await?;
        *self.exceeded.write().unwrap_or_else(PoisonError::into_inner) = exceeded.into_iter().collect();
        Ok(Round::Idle)
    }

    /// Counts the waiting messages of all tenants and stores the counts.
    pub(crate) async fn count(&self, db: &PgPool) -> Result<Round, sqlx::Error> {
        let started_at = Instant::now();
        store::backlog::count(&mut *db.acquire().await?, self.max).await?;
        Ok(Round::IdleFor(COUNT_PAUSE_MIN.max(started_at.elapsed() * COUNT_PAUSE_FACTOR)))
    }
}

fn too_many_waiting(tenant: &Tenant, waiting: i64, max: i64) -> Problem {
    let detail = format!(
        "{waiting} messages of the tenant `{}` wait for their subscribers, and at most {max} may (`hub.waiting_max`): resume or delete paused subscribers, or repair those that fail, and try again later",
        tenant.as_str()
    );
    Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-waiting", detail).retry_after(RETRY_AFTER)
}
