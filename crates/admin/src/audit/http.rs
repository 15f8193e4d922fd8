//! `/admin/v1/audit`: who acted for which tenant.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http_kit::auth::Operator;
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::AuditLine;
use super::store::{self, AuditFilter};
use crate::Administration;

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    OpenApiRouter::new().routes(routes!(list))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditFilters {
    /// Only requests for this tenant.
    #[param(value_type = Option<http_kit::openapi::TenantName>)]
    tenant: Option<Tenant>,
    /// Only requests of this API key.
    key_id: Option<Uuid>,
    /// Only requests at this time or later.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Only requests before this time.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
}

/// List the requests that acted for a tenant, newest first
///
/// Requests with the header `Pillarbox-Tenant`. A request that changes something has its line before it takes effect; the
/// status of its response follows shortly after.
#[utoipa::path(get, path = "/admin/v1/audit", operation_id = "listAuditTrail", tag = "admin", params(Listing<AuditFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<AuditLine>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<AuditFilters>,
) -> Result<Page<AuditLine>, Problem> {
    let scope = PageScope::global(&admin.cursor_key, "audit", &filters);
    let before = scope.position(cursor.as_deref())?;
    let AuditFilters { tenant, key_id, from, to } = filters;
    let filter = AuditFilter { tenant, key_id, from, to };
    let lines = async { store::list(&mut *admin.db.acquire().await?, &filter, before, i64::from(limit) + 1).await };
    let lines = lines.await.map_err(|error: sqlx::Error| http_kit::database::problem(&error))?;
    Ok(scope.cut(lines, limit, |line| line.id))
}
