//! Exchanges demands between processes once a second, so that the limits of keys and tenants hold over all of them.
//!
//! Owns the table `pillarbox_admin.rate_demand`. While the database does not respond, each process uses an even share.

pub(crate) mod store;

use std::collections::HashMap;

use http_kit::admission::limit::{Demand, RateLimits};
use runtime::worker::Round;
use sqlx::PgPool;
use uuid::Uuid;

/// One process that serves the API.
pub(crate) struct RateExchange {
    process: Uuid,
    limits: RateLimits,
    db: PgPool,
}

impl RateExchange {
    pub(crate) fn new(limits: RateLimits, db: PgPool) -> RateExchange {
        RateExchange { process: Uuid::now_v7(), limits, db }
    }

    /// Reports the demands of this process, and applies those of the others.
    pub(crate) async fn round(&self) -> Result<Round, sqlx::Error> {
        let mut db = self.db.acquire().await?;
        let own = self.limits.demands();
        store::report(&mut db, self.process, &own).await?;
        let others = store::others(&mut db, self.process, &own).await?;
        let processes = store::count_processes(&mut db).await?;
        self.limits.apply(&own, &sums(others), processes);
        Ok(Round::Idle)
    }

    /// Removes the demands of this process, so that the others use its share at once.
    pub(crate) async fn end(&self) -> Result<(), sqlx::Error> {
        store::remove(&mut *self.db.acquire().await?, self.process).await
    }
}

fn sums(demands: Vec<Demand>) -> HashMap<String, u64> {
    let mut sums = HashMap::new();
    for Demand { subject, count } in demands {
        *sums.entry(subject).or_default() += u64::from(count);
    }
    sums
}
