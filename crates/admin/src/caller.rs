//! Who the caller is: what a user interface needs to know about the credentials that it was given.

use std::sync::Arc;

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use chrono::{DateTime, Utc};
use http_kit::auth::{Caller, PortalAccess, Principal, Role};
use http_kit::extract::Json;
use http_kit::openapi::{self, RouteProblem};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::Administration;
use crate::{keys, portal_tokens};

/// The name of the admin key in the settings, which has no row.
const KEY_OF_SETTINGS: &str = "admin key (from the settings)";

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    let mut router = OpenApiRouter::new().routes(routes!(show));
    let description = router.get_openapi_mut();
    openapi::accept_tenant_header(description);
    openapi::document(description, PROBLEMS);
    router
}

const PROBLEMS: &[RouteProblem] =
    &[("GET /hub/v1/caller", 404, "tenant-not-found", "there is no tenant `acme`: check the spelling")];

/// A caller who may use a user interface: one with the role `manage` or a portal token.
struct ConsoleUser(Caller);

impl<S: Send + Sync> FromRequestParts<S> for ConsoleUser {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<ConsoleUser, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        if caller.portal.is_none() {
            caller.require(Role::Manage)?;
        }
        Ok(ConsoleUser(caller))
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum CallerKind {
    Key,
    PortalToken,
    User,
}

/// The caller of this request.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Caller)]
struct CallerView {
    kind: CallerKind,
    /// The name of the key or of the portal token; for a user their id.
    #[schema(example = "support desk")]
    name: String,
    /// The tenant that the request acts for.
    #[schema(value_type = http_kit::openapi::TenantName)]
    tenant: Tenant,
    /// The roles of the caller, each of which includes the ones before it. A portal token has none.
    roles: Vec<Role>,
    /// Whether the caller operates the whole installation. An operator who acts for a tenant does not.
    is_operator: bool,
    /// Whether the caller may change nothing.
    read_only: bool,
    /// When the key or the portal token expires. Absent: it does not, or the caller is a user.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<DateTime<Utc>>,
}

/// Show who the caller is
///
/// For user interfaces: what the key, the portal token or the user's token allows.
#[utoipa::path(get, path = "/hub/v1/caller", operation_id = "getCaller", tag = "hub", security(("bearer" = [])),
    responses((status = 200, body = CallerView)))]
async fn show(
    State(admin): State<Arc<Administration>>,
    ConsoleUser(caller): ConsoleUser,
) -> Result<Json<CallerView>, Problem> {
    let (kind, name, expires_at) = match caller.principal {
        Principal::User(id) => (CallerKind::User, id.to_string(), None),
        Principal::Key(id) if id == Uuid::nil() => (CallerKind::Key, KEY_OF_SETTINGS.to_owned(), None),
        Principal::Key(id) => {
            let (name, expires_at) = keys::flow::name_and_expiry(&admin.db, id).await?.unwrap_or_default();
            (CallerKind::Key, name, expires_at)
        }
        Principal::Portal(id) => {
            let found = portal_tokens::flow::name_and_expiry(&admin.db, id).await?;
            let (name, expires_at) = found.unwrap_or_default();
            (CallerKind::PortalToken, name.unwrap_or_default(), expires_at)
        }
    };
    let roles = [Role::Ingest, Role::Manage, Role::Admin].into_iter().filter(|role| Some(*role) <= caller.role);
    Ok(Json(CallerView {
        kind,
        name,
        roles: roles.collect(),
        is_operator: caller.is_operator(),
        read_only: caller.portal == Some(PortalAccess::Read),
        expires_at,
        tenant: caller.tenant,
    }))
}
