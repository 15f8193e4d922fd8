//! The HTTP API of portal tokens, under `/hub/v1/portal-tokens`, for managers of a tenant.

use std::sync::Arc;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use chrono::{DateTime, Utc};
use http_kit::auth::{Caller, PortalAccess, Role};
use http_kit::extract::Path;
use http_kit::field::Whole;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::openapi::{self, RouteProblem};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{NewPortalToken, PortalToken, flow};
use crate::Administration;

const SECONDS_DEFAULT: i64 = 3_600;

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    let mut router = OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(revoke));
    let description = router.get_openapi_mut();
    openapi::accept_tenant_header(description);
    openapi::document(description, PROBLEMS);
    router
}

/// The problems of the module's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("* /hub/v1/portal-tokens*", 404, "tenant-not-found", "there is no tenant `acme`: check the spelling"),
    ("POST /hub/v1/portal-tokens", 409, "already-answered", ALREADY_ANSWERED),
    ("DELETE /hub/v1/portal-tokens/{id}", 404, "portal-token-not-found", "there is no such portal token (any more)"),
];
const ALREADY_ANSWERED: &str = "the first request succeeded, and the secret in its response is shown only once: create another \
                                portal token with a new Idempotency-Key";

/// A caller with the role `manage`. A portal token has no role, so it does not create others.
struct TokenManager(Caller);

impl<S: Send + Sync> FromRequestParts<S> for TokenManager {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<TokenManager, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        caller.require(Role::Manage)?;
        Ok(TokenManager(caller))
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewPortalToken, example = json!({"access": "read", "expires_in_seconds": 3600, "name": "support desk"}))]
struct CreatePortalToken {
    access: PortalAccess,
    /// How long the token is valid.
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 86_400, default = 3600)]
    expires_in_seconds: Option<Whole>,
    /// A name that tells what the token is used for.
    #[schema(format = "line", max_length = 100)]
    name: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
struct CreatedPortalToken {
    /// The token itself. It is not shown again.
    #[schema(example = "pbxp_...")]
    token: String,
    id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[schema(value_type = http_kit::openapi::TenantName)]
    tenant: Tenant,
    access: PortalAccess,
    created_at: DateTime<Utc>,
    expires_at: DateTime<Utc>,
}

/// List the portal tokens that are valid, newest first
#[utoipa::path(get, path = "/hub/v1/portal-tokens", operation_id = "listPortalTokens", tag = "hub", params(Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<PortalToken>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    TokenManager(caller): TokenManager,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<PortalToken>, Problem> {
    let scope = PageScope::of_owner(&admin.cursor_key, "portal tokens", caller.tenant.as_str(), &filters);
    let before = scope.position(cursor.as_deref())?;
    let tokens = flow::list(&admin.db, &caller.tenant, before, limit + 1).await?;
    Ok(scope.cut(tokens, limit, |token| token.id))
}

/// Create a portal token; only the response shows it
///
/// A token for the employees of the tenant. With the access `read` it reads everything of the tenant under `/hub/v1`, without
/// secrets; with `manage` it also manages subscribers, streams, replays and the catalogue, and retries messages. It neither posts
/// events nor creates keys or further tokens, and is accepted nowhere else.
#[utoipa::path(post, path = "/hub/v1/portal-tokens", operation_id = "createPortalToken", tag = "hub", request_body = CreatePortalToken,
    params(("idempotency-key" = Option<String>, Header,
        description = "A repeat with the same key has no further effect, and does not show the token again")),
    security(("bearer" = [])), responses((status = 201, body = CreatedPortalToken)))]
async fn create(
    State(admin): State<Arc<Administration>>,
    TokenManager(caller): TokenManager,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<CreatePortalToken>>,
) -> Result<StoredResponse, Problem> {
    let expires_in_seconds = body.expires_in_seconds.map_or(SECONDS_DEFAULT, |Whole(seconds)| seconds);
    let new = NewPortalToken { name: body.name, access: body.access, expires_in_seconds };
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithoutBody, |tx| {
        Box::pin(async move {
            let (token, secret) = flow::create(tx, &caller, new).await?;
            let next_step = format!(
                "portal token {id} exists; revoke it with DELETE /hub/v1/portal-tokens/{id}, and create another one with a \
                 new Idempotency-Key",
                id = token.id
            );
            let PortalToken { id, name, tenant, access, created_at, expires_at } = token;
            let token = secret.reveal().clone();
            let created = CreatedPortalToken { token, id, name, tenant, access, created_at, expires_at };
            Ok(StoredResponse::json(StatusCode::CREATED, &created).shown_once(next_step))
        })
    })
    .await
}

/// Revoke a portal token
///
/// This process refuses the token at once, others within 2 s.
#[utoipa::path(delete, path = "/hub/v1/portal-tokens/{id}", operation_id = "revokePortalToken", tag = "hub",
    params(("id" = Uuid, Path), ("idempotency-key" = Option<String>, Header,
        description = "A repeat with the same key has no further effect")),
    security(("bearer" = [])), responses((status = 204, description = "The token is revoked"),
        (status = 404, description = "There is no such portal token")))]
async fn revoke(
    State(admin): State<Arc<Administration>>,
    TokenManager(caller): TokenManager,
    Path(id): Path<Uuid>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let revoked = run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::revoke(tx, &caller.tenant, id).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await?;
    admin.keys.clear();
    Ok(revoked)
}
