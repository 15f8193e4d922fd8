//! Periodic tasks: the exchange of demands on rate limits, and the removal of what has expired.

use std::time::Duration;

use http_kit::admission::limit::RateLimits;
use pillarbox::consumers::Runtime;
use pillarbox::database::time::maintain;
use runtime::worker::{Round, RoundLimits};
use sqlx::PgPool;

use crate::rate_exchange::RateExchange;
use crate::tenants::flow::{DeleteTenantRows, remove_deleted};
use crate::{audit, portal_tokens};

/// Time between two removals of old audit lines, expired portal tokens and deleted tenants.
const REMOVE_PAUSE: Duration = Duration::from_secs(60);
/// Time between two exchanges of the demands on shared rate limits.
const RATE_PAUSE: Duration = Duration::from_secs(1);

pub(crate) fn start_rate_exchange(runtime: &Runtime, limits: RateLimits) {
    let exchange = RateExchange::new(limits, runtime.db().pool().clone());
    let worker = runtime.worker("rate limits".to_owned(), RATE_PAUSE);
    runtime.spawn(async move {
        worker.run(|| exchange.round()).await;
        if let Err(error) = exchange.end().await {
            tracing::debug!(%error, "the demands of this process remain for some seconds");
        }
    });
}

pub(crate) fn start_removal(runtime: &Runtime, audit_days: u32, tenant_rows: Vec<DeleteTenantRows>) {
    let worker = runtime.worker("tenants".to_owned(), REMOVE_PAUSE).with_limits(RoundLimits::LONG);
    let db = runtime.db().pool().clone();
    runtime.spawn(async move { worker.run(|| maintain(&db, remove_old(&db, audit_days, &tenant_rows))).await });
}

/// Removes what has expired: audit lines, portal tokens, what deleted tenants still have, and finally their names.
async fn remove_old(db: &PgPool, audit_days: u32, tenant_rows: &[DeleteTenantRows]) -> Result<Round, sqlx::Error> {
    portal_tokens::flow::remove_expired(db).await?;
    let (audit, tenants) = (audit::remove_old(db, audit_days).await?, remove_deleted(db, tenant_rows).await?);
    Ok(if audit == Round::Busy { audit } else { tenants })
}
