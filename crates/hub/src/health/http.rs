//! The health of subscribers.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, TimeDelta, Utc};
use http_kit::extract::{Json, Path, Query, query_problem};
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::Hub;
use crate::access::Manager;
use crate::health::flow;
use crate::health::view::{HealthView, Resolution};

/// The time that is shown by default.
const SPAN_DEFAULT: TimeDelta = TimeDelta::hours(24);

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new().routes(routes!(show))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct HealthQuery {
    /// Attempts that ended in this minute or later. Default: 24 hours before `to`.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Attempts that ended before this minute. Default: now.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// The length of the intervals: `minute` for at most 1 day, `hour` for at most 31, `day` for at most 366.
    #[serde(default)]
    #[param(inline)]
    resolution: Resolution,
}

/// Show the health of a subscriber
///
/// Its state now, and for each interval the attempts, their success rate and their response times. The attempts of a minute
/// appear within some seconds after its end.
#[utoipa::path(get, path = "/hub/v1/subscribers/{id}/health", operation_id = "getSubscriberHealth", tag = "hub", params(("id" = Uuid, Path), HealthQuery),
    security(("bearer" = [])),
    responses((status = 200, body = HealthView), (status = 404, description = "There is no such subscriber")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Query(query): Query<HealthQuery>,
) -> Result<Json<HealthView>, Problem> {
    let (from, to) = range(&query, hub.clock.now())?;
    Ok(Json(flow::show(&hub, &caller.tenant, id, from, to, query.resolution).await?))
}

/// Returns the time that is asked for. Fails if it is longer than the resolution allows.
fn range(query: &HealthQuery, now: DateTime<Utc>) -> Result<(DateTime<Utc>, DateTime<Utc>), Problem> {
    let to = query.to.unwrap_or(now);
    let from = query.from.or_else(|| to.checked_sub_signed(SPAN_DEFAULT)).unwrap_or(to);
    let days_max = match query.resolution {
        Resolution::Minute => 1,
        Resolution::Hour => 31,
        Resolution::Day => 366,
    };
    if from > to || to.signed_duration_since(from) > TimeDelta::days(days_max) {
        let detail = format!("must be before `to`, by at most {days_max} days with this `resolution`");
        return Err(query_problem("/from", detail));
    }
    Ok((from, to))
}
