//! The HTTP API of API keys, under `/admin/v1/keys`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use http_kit::auth::{Admin, Caller, Role};
use http_kit::extract::Path;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::openapi::{self, RouteProblem};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use service::idempotency::{self, StoreResponse};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{ApiKey, NewKey, flow};
use crate::Administration;

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    let mut router = OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(revoke));
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// The problems of the module's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("POST /admin/v1/keys", 409, "already-answered", ALREADY_ANSWERED),
    ("DELETE /admin/v1/keys/{id}", 404, "key-not-found", "there is no such API key"),
];
const ALREADY_ANSWERED: &str = "the first request succeeded, and the secret in its response is shown only once: revoke the \
                                key with DELETE /admin/v1/keys/{id}, and create another one with a new Idempotency-Key";

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewApiKey, example = json!({"name": "orders service", "role": "ingest", "tenant": "acme"}))]
struct CreateKey {
    /// A name that tells what the key is used for.
    #[schema(format = "line", max_length = 100, example = "orders service")]
    name: String,
    role: Role,
    /// Absent: the tenant of the caller.
    #[schema(value_type = Option<http_kit::openapi::TenantName>)]
    tenant: Option<Tenant>,
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CreatedApiKey)]
struct CreatedKey {
    /// The key itself. It is not shown again.
    key: String,
    #[serde(flatten)]
    details: ApiKey,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct KeyFilters {
    /// Only keys of this tenant.
    #[param(value_type = Option<http_kit::openapi::TenantName>)]
    tenant: Option<Tenant>,
}

/// List API keys, newest first
#[utoipa::path(get, path = "/admin/v1/keys", operation_id = "listApiKeys", tag = "admin", params(Listing<KeyFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<ApiKey>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    Admin(caller): Admin,
    Listing { filters, limit, cursor }: Listing<KeyFilters>,
) -> Result<Page<ApiKey>, Problem> {
    let tenant = managed_tenant(&caller, filters.tenant)?;
    let owner = tenant.as_ref().map_or("*", Tenant::as_str);
    let scope = PageScope::of_owner(&admin.cursor_key, "keys", owner, &());
    let before = scope.position(cursor.as_deref())?;
    let keys = flow::list(&admin.db, tenant.as_ref(), before, limit + 1).await?;
    Ok(scope.cut(keys, limit, |key| key.id))
}

/// Create an API key; only the response shows it
#[utoipa::path(post, path = "/admin/v1/keys", operation_id = "createApiKey", tag = "admin", request_body = CreateKey,
    params(("idempotency-key" = Option<String>, Header, description = "A repeated request with the same key has no further effect")), security(("bearer" = [])),
    responses((status = 201, body = CreatedKey)))]
async fn create(
    State(admin): State<Arc<Administration>>,
    Admin(caller): Admin,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<CreateKey>>,
) -> Result<StoredResponse, Problem> {
    let tenant = body.tenant.unwrap_or_else(|| caller.tenant.clone());
    managed_tenant(&caller, Some(tenant.clone()))?;
    let new = NewKey { name: body.name, role: body.role, tenant, expires_at: body.expires_at };
    idempotency::run_once(&admin.db, identity.as_ref(), StoreResponse::WithoutBody, |tx| {
        Box::pin(async move {
            let (details, secret) = flow::create(tx, new).await?;
            let next_step = format!(
                "key {id} exists; revoke it with DELETE /admin/v1/keys/{id}, and create another one with a new \
                 Idempotency-Key",
                id = details.id
            );
            let created = CreatedKey { key: secret.reveal().clone(), details };
            Ok(StoredResponse::json(StatusCode::CREATED, &created).shown_once(next_step))
        })
    })
    .await
}

/// Revoke an API key
#[utoipa::path(delete, path = "/admin/v1/keys/{id}", operation_id = "revokeApiKey", tag = "admin", params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 204, description = "The key is revoked"), (status = 404, description = "The key does not exist")))]
async fn revoke(
    State(admin): State<Arc<Administration>>,
    Admin(caller): Admin,
    Path(id): Path<Uuid>,
) -> Result<impl IntoResponse, Problem> {
    let tenant = managed_tenant(&caller, None)?;
    flow::revoke(&admin.db, id, tenant.as_ref()).await?;
    admin.keys.clear();
    Ok(StatusCode::NO_CONTENT)
}

/// The requested tenant, if this admin may manage its keys. `None`: all tenants. Fails for admins of other tenants.
fn managed_tenant(caller: &Caller, requested: Option<Tenant>) -> Result<Option<Tenant>, Problem> {
    match requested {
        requested if caller.is_operator() => Ok(requested),
        Some(other) if other != caller.tenant => {
            Err(Problem::forbidden("an admin of this tenant manages only the keys of this tenant"))
        }
        _ => Ok(Some(caller.tenant.clone())),
    }
}
