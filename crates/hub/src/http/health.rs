//! The health of subscribers.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use kit::extract::{Json, Path, Query};
use kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Manager;
use crate::Hub;
use crate::flow::health as flow;
use crate::view::{HealthView, Resolution};

pub(super) fn router() -> OpenApiRouter<Arc<Hub>> {
    OpenApiRouter::new().routes(routes!(show))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct HealthQuery {
    /// Attempts that ended in this minute or later. Default: 24 hours before `to`.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Attempts that ended before this minute. Default: now.
    #[serde(default, deserialize_with = "kit::instant::optional")]
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
#[utoipa::path(get, path = "/hub/v1/subscribers/{id}/health", tag = "hub", params(("id" = Uuid, Path), HealthQuery),
    security(("bearer" = [])),
    responses((status = 200, body = HealthView), (status = 404, description = "There is no such subscriber")))]
async fn show(
    State(hub): State<Arc<Hub>>,
    Manager(caller): Manager,
    Path(id): Path<Uuid>,
    Query(HealthQuery { from, to, resolution }): Query<HealthQuery>,
) -> Result<Json<HealthView>, Problem> {
    Ok(Json(flow::show(&hub, &caller.tenant, id, (from, to), resolution).await?))
}
