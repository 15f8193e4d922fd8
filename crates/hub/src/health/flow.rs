//! The health of a subscriber over time.

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use uuid::Uuid;

use crate::error::Error;
use crate::health::counts::AttemptCounts;
use crate::health::store;
use crate::health::view::{HealthState, HealthView, IntervalView, Resolution};
use crate::{Hub, subscribers};

/// Returns the state of a subscriber, and what its attempts between the two times led to.
pub(crate) async fn show(
    hub: &Hub,
    tenant: &Tenant,
    id: Uuid,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    resolution: Resolution,
) -> Result<HealthView, Error> {
    let mut db = hub.db.acquire().await?;
    let stored =
        subscribers::store::find(&mut db, &hub.cipher, tenant, id).await?.ok_or(Error::NoSubscriber)?.subscriber;
    let state = store::find_state(&mut db, id).await?;
    let counts = store::counts(&mut db, id, from, to, resolution.into()).await?;
    let mut totals = AttemptCounts::default();
    counts.iter().for_each(|since| totals.add(&since.counts));
    let failing_since = state.as_ref().and_then(|state| state.failing_since);
    let current = match &state {
        _ if !stored.settings.is_active => HealthState::Disabled,
        _ if stored.paused_at.is_some() => HealthState::Paused,
        Some(state) if state.is_breaker_open => HealthState::BreakerOpen,
        Some(state) if state.failing_since.is_some() => HealthState::Failing,
        Some(_) | None => HealthState::Healthy,
    };
    let series = counts.iter().map(|since| IntervalView::new(since.start, &since.counts)).collect();
    Ok(HealthView {
        subscriber_id: id,
        state: current,
        failing_since,
        from,
        to,
        resolution,
        totals: (&totals).into(),
        series,
    })
}
