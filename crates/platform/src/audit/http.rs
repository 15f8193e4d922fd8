//! `/admin/v1/audit`: who acted for which tenant.

use axum::extract::State;
use chrono::{DateTime, Utc};
use kit::auth::{Operator, Tenant};
use kit::page::{Listing, Page, PageScope};
use kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::AuditLine;
use super::store::{self, AuditFilter};
use crate::app::App;

pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditFilters {
    /// Only requests for this tenant.
    tenant: Option<Tenant>,
    /// Only requests of this API key.
    key_id: Option<Uuid>,
    /// Only requests at this time or later.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Only requests before this time.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
}

/// List the requests that acted for a tenant, newest first
///
/// Requests with the header `Pillarbox-Tenant`. A request that changes something has its line before it takes effect; the
/// status of its response follows shortly after.
#[utoipa::path(get, path = "/admin/v1/audit", tag = "admin", params(Listing<AuditFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<AuditLine>)))]
async fn list(
    State(app): State<App>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<AuditFilters>,
) -> Result<Page<AuditLine>, Problem> {
    let scope = PageScope::global(&app.cursor_key, "audit", &filters);
    let before = scope.position(cursor.as_deref())?;
    let AuditFilters { tenant, key_id, from, to } = filters;
    let filter = AuditFilter { tenant, key_id, from, to };
    let lines = async { store::list(&mut *app.db.acquire().await?, &filter, before, i64::from(limit) + 1).await };
    let lines = lines.await.map_err(|error: sqlx::Error| mailbox::database::problem(&error))?;
    Ok(scope.cut(lines, limit, |line| line.id))
}
