//! The health of a subscriber over time.

use chrono::{DateTime, TimeDelta, Utc};
use kit::auth::Tenant;
use kit::problem::{FieldError, Location};
use uuid::Uuid;

use crate::Hub;
use crate::error::Error;
use crate::health::AttemptCounts;
use crate::store::{health as store, subscriber};
use crate::view::{HealthState, HealthView, IntervalView, Resolution};

/// The time that is shown by default.
const SPAN_DEFAULT: TimeDelta = TimeDelta::hours(24);

/// Returns the state of a subscriber, and what its attempts between the two times led to. Fails if the time is longer than the
/// resolution allows.
pub(crate) async fn show(
    hub: &Hub,
    tenant: &Tenant,
    id: Uuid,
    (from, to): (Option<DateTime<Utc>>, Option<DateTime<Utc>>),
    resolution: Resolution,
) -> Result<HealthView, Error> {
    let to = to.unwrap_or_else(|| hub.clock.now());
    let from = from.or_else(|| to.checked_sub_signed(SPAN_DEFAULT)).unwrap_or(to);
    let days_max = match resolution {
        Resolution::Minute => 1,
        Resolution::Hour => 31,
        Resolution::Day => 366,
    };
    if from > to || to.signed_duration_since(from) > TimeDelta::days(days_max) {
        let detail = format!("must be before `to`, by at most {days_max} days with this `resolution`");
        return Err(Error::Invalid(vec![FieldError::at(Location::Query, "/from", detail)]));
    }
    let mut db = hub.db.acquire().await?;
    let stored = subscriber::find(&mut db, &hub.cipher, tenant, id).await?.ok_or(Error::NoSubscriber)?.subscriber;
    let state = store::find_state(&mut db, id).await?;
    let counts = store::counts(&mut db, id, (from, to), resolution.into()).await?;
    let mut totals = AttemptCounts::default();
    counts.iter().for_each(|(_, counts)| totals.add(counts));
    let failing_since = state.as_ref().and_then(|state| state.failing_since);
    let current = match &state {
        _ if !stored.settings.is_active => HealthState::Disabled,
        _ if stored.paused_at.is_some() => HealthState::Paused,
        Some(state) if state.is_breaker_open => HealthState::BreakerOpen,
        Some(state) if state.failing_since.is_some() => HealthState::Failing,
        Some(_) | None => HealthState::Healthy,
    };
    let series = counts.iter().map(|(at, counts)| IntervalView::new(*at, counts)).collect();
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
