//! The HTTP API of tenants, under `/admin/v1/tenants`, for operators.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header::{ETAG, LOCATION};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use http_kit::auth::Operator;
use http_kit::etag::{self, IfMatch, IfNoneMatch};
use http_kit::extract::{Json, Path};
use http_kit::field::{Field, Whole};
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::openapi::{self, RouteProblem};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use service::idempotency::{StoreResponse, run_once};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{TenantFields, TenantFilter, TenantRecord, flow};
use crate::Administration;

/// The description of the header `Idempotency-Key`.
const KEY: &str = "A repeated request with the same key has no further effect";
/// The description of the header `If-Match`.
const IF_MATCH: &str = "Fails with 412 unless this is the current ETag";

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    let mut router = OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(show, update, delete))
        .routes(routes!(suspend))
        .routes(routes!(resume));
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// The problems of the module's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("POST /admin/v1/tenants", 409, "tenant-exists", "the tenant acme exists already"),
    (
        "POST /admin/v1/tenants",
        409,
        "tenant-name-in-use",
        "the tenant acme was deleted, and its messages are in the log",
    ),
    ("* /admin/v1/tenants/{tenant}*", 404, "tenant-not-found", "there is no such tenant"),
    ("POST /admin/v1/tenants/{tenant}/*", 409, "tenant-main", MAIN),
    ("DELETE /admin/v1/tenants/{tenant}", 409, "tenant-main", MAIN),
    ("DELETE /admin/v1/tenants/{tenant}", 409, "tenant-active", "only a suspended tenant can be deleted"),
];
const MAIN: &str = "the tenant main belongs to the operator and can be neither suspended nor deleted";

/// A tenant to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "globex", "display_name": "Globex Corporation", "metadata": {"plan": "pro"},
    "subscribers_max": 50}))]
struct NewTenant {
    /// The name in requests and messages. It cannot be changed.
    #[schema(value_type = http_kit::openapi::TenantName)]
    name: Tenant,
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "line", max_length = 100)]
    display_name: Field<String>,
    /// Texts by name, of at most 8,192 bytes.
    #[serde(default)]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    metadata: Field<BTreeMap<String, String>>,
    /// Null: `hub.subscribers_max` applies.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 100_000)]
    subscribers_max: Field<Whole>,
    /// Events per second over HTTP, in all processes together. Null: no limit.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 1_000_000)]
    events_per_second_max: Field<Whole>,
    /// Bytes of a payload. Null: 262,144.
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 262_144)]
    payload_bytes_max: Field<Whole>,
}

/// A change of a tenant. Absent fields stay unchanged; null resets a field to its default.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"events_per_second_max": 500, "subscribers_max": null}))]
struct ChangedTenant {
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "line", max_length = 100)]
    display_name: Field<String>,
    /// Replaces all metadata: texts by name, of at most 8,192 bytes.
    #[serde(default)]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    metadata: Field<BTreeMap<String, String>>,
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 100_000)]
    subscribers_max: Field<Whole>,
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 1_000_000)]
    events_per_second_max: Field<Whole>,
    #[serde(default)]
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 262_144)]
    payload_bytes_max: Field<Whole>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TenantFilters {
    /// Only tenants that are suspended, or that are not.
    suspended: Option<bool>,
    /// Only tenants whose name or display name contains this text, in upper or lower case.
    #[param(example = "globex")]
    q: Option<String>,
}

impl From<TenantFilters> for TenantFilter {
    fn from(filters: TenantFilters) -> TenantFilter {
        TenantFilter { is_suspended: filters.suspended, name: filters.q }
    }
}

/// A tenant after a change.
#[derive(Debug, Serialize, ToSchema)]
struct ChangedTenantDetails {
    #[serde(flatten)]
    tenant: TenantRecord,
    /// False in the response 202 to a change that a process has not confirmed in time. Absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    effective: Option<bool>,
}

/// List tenants, by name
#[utoipa::path(get, path = "/admin/v1/tenants", operation_id = "listTenants", tag = "admin", params(Listing<TenantFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<TenantRecord>)))]
async fn list(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<TenantFilters>,
) -> Result<Page<TenantRecord>, Problem> {
    let scope = PageScope::global(&admin.cursor_key, "tenants", &filters);
    let after: Option<String> = scope.position(cursor.as_deref())?;
    let tenants = flow::list(&admin.db, &TenantFilter::from(filters), after.as_deref(), limit + 1).await?;
    Ok(scope.cut(tenants, limit, |tenant| tenant.name.as_str().to_owned()))
}

/// Create a tenant
///
/// A tenant has to exist before keys can be created and events can be posted for it. The tenant `main` always exists.
#[utoipa::path(post, path = "/admin/v1/tenants", operation_id = "createTenant", tag = "admin", request_body = NewTenant,
    params(("idempotency-key" = Option<String>, Header, description = KEY)), security(("bearer" = [])),
    responses((status = 201, body = TenantRecord, headers(("location" = String, description = "The path of the tenant"),
        ("etag" = String, description = "The version of the tenant")))))]
async fn create(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Mutation { body: JsonBody(new), identity }: Mutation<JsonBody<NewTenant>>,
) -> Result<StoredResponse, Problem> {
    let NewTenant { name, display_name, metadata, subscribers_max, events_per_second_max, payload_bytes_max } = new;
    let fields = TenantFields { display_name, metadata, subscribers_max, events_per_second_max, payload_bytes_max };
    run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let tenant = flow::create(tx, name, fields).await?;
            let location = HeaderValue::try_from(format!("/admin/v1/tenants/{}", tenant.name.as_str()))
                .map_err(|error| Problem::internal(&error))?;
            Ok(response(StatusCode::CREATED, &tenant).with_header(LOCATION, location))
        })
    })
    .await
}

/// Show a tenant
#[utoipa::path(get, path = "/admin/v1/tenants/{tenant}", operation_id = "getTenant", tag = "admin",
    params(("tenant" = http_kit::openapi::TenantName, Path),
        ("if-none-match" = Option<String>, Header, description = "The ETag of the copy that the caller has")),
    security(("bearer" = [])),
    responses((status = 200, body = TenantRecord, headers(("etag" = String, description = "The version of the tenant"))),
        (status = 304, description = "The tenant has not changed"),
        (status = 404, description = "There is no such tenant")))]
async fn show(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<Tenant>,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let tenant = flow::show(&admin.db, &name).await?;
    let tag = etag::of(tenant.version, tenant.updated_at);
    if if_none_match.matches(&tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response());
    }
    Ok(([(ETAG, tag)], Json(tenant)).into_response())
}

/// Change a tenant
///
/// Absent fields stay unchanged; null resets a field to its default. New limits apply at once in this process, and within 2 s
/// in others.
#[utoipa::path(patch, path = "/admin/v1/tenants/{tenant}", operation_id = "updateTenant", tag = "admin", request_body = ChangedTenant,
    params(("tenant" = http_kit::openapi::TenantName, Path), ("if-match" = Option<String>, Header, description = IF_MATCH),
        ("idempotency-key" = Option<String>, Header, description = KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = TenantRecord, headers(("etag" = String, description = "The version of the tenant"))),
        (status = 404, description = "There is no such tenant"),
        (status = 412, description = "The tenant has another version than `If-Match`")))]
async fn update(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<Tenant>,
    if_match: IfMatch,
    Mutation { body: JsonBody(changed), identity }: Mutation<JsonBody<ChangedTenant>>,
) -> Result<StoredResponse, Problem> {
    let ChangedTenant { display_name, metadata, subscribers_max, events_per_second_max, payload_bytes_max } = changed;
    let fields = TenantFields { display_name, metadata, subscribers_max, events_per_second_max, payload_bytes_max };
    let changed = run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move { Ok(response(StatusCode::OK, &flow::update(tx, &name, &if_match, fields).await?)) })
    })
    .await?;
    admin.keys.clear();
    Ok(changed)
}

/// Suspend a tenant
///
/// Its keys and portal tokens are refused with 403 `tenant-suspended`, and messages to its subscribers wait until it is
/// resumed, at most as long as the log retains them; its streams cannot be read. Posts in SQL are accepted and also wait. Nothing
/// is sent once the response has arrived, except requests that were already on their way.
#[utoipa::path(post, path = "/admin/v1/tenants/{tenant}/suspend", operation_id = "suspendTenant", tag = "admin",
    params(("tenant" = http_kit::openapi::TenantName, Path), ("if-match" = Option<String>, Header, description = IF_MATCH),
        ("idempotency-key" = Option<String>, Header, description = KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = ChangedTenantDetails, headers(("etag" = String, description = "The version of the tenant"))),
        (status = 202, body = ChangedTenantDetails,
        description = "The change is stored, but a process has not confirmed it in time: `effective` is false"),
        (status = 404, description = "There is no such tenant"),
        (status = 412, description = "The tenant has another version than `If-Match`")))]
async fn suspend(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<Tenant>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    set_suspended(&admin, name, if_match, identity, true).await
}

/// Resume a suspended tenant
///
/// The messages that wait are sent in their order.
#[utoipa::path(post, path = "/admin/v1/tenants/{tenant}/resume", operation_id = "resumeTenant", tag = "admin",
    params(("tenant" = http_kit::openapi::TenantName, Path), ("if-match" = Option<String>, Header, description = IF_MATCH),
        ("idempotency-key" = Option<String>, Header, description = KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = ChangedTenantDetails, headers(("etag" = String, description = "The version of the tenant"))),
        (status = 202, body = ChangedTenantDetails,
        description = "The change is stored, but a process has not confirmed it in time: `effective` is false"),
        (status = 404, description = "There is no such tenant"),
        (status = 412, description = "The tenant has another version than `If-Match`")))]
async fn resume(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<Tenant>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    set_suspended(&admin, name, if_match, identity, false).await
}

/// Delete a suspended tenant
///
/// Its API keys, portal tokens, subscribers, streams, replays and event types are deleted with it, and messages that wait are not
/// sent. Its dead letters, and what other services have of it, are deleted soon after. Its messages stay in the log until their
/// retention ends; the name cannot be reused until then.
#[utoipa::path(delete, path = "/admin/v1/tenants/{tenant}", operation_id = "deleteTenant", tag = "admin",
    params(("tenant" = http_kit::openapi::TenantName, Path), ("if-match" = Option<String>, Header, description = IF_MATCH),
        ("idempotency-key" = Option<String>, Header, description = KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The tenant is deleted"),
        (status = 404, description = "There is no such tenant"),
        (status = 412, description = "The tenant has another version than `If-Match`")))]
async fn delete(
    State(admin): State<Arc<Administration>>,
    _: Operator,
    Path(name): Path<Tenant>,
    if_match: IfMatch,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let deleted = run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::delete(tx, &name, &if_match).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await?;
    admin.keys.clear();
    Ok(deleted)
}

async fn set_suspended(
    admin: &Administration,
    name: Tenant,
    if_match: IfMatch,
    identity: Option<RequestIdentity>,
    is_suspended: bool,
) -> Result<StoredResponse, Problem> {
    let changed = run_once(&admin.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let tenant = flow::set_suspended(tx, &name, &if_match, is_suspended).await?;
            Ok(response(StatusCode::OK, &tenant))
        })
    })
    .await?;
    admin.keys.clear();
    // Also for a repeat: the request that made the change may not have waited for its end.
    if !changed.status().is_success() || flow::wait_until_effective(&admin.db, admin.propagation).await {
        return Ok(changed);
    }
    let mut body: Map<String, Value> = serde_json::from_slice(changed.body()).unwrap_or_default();
    body.insert("effective".to_owned(), Value::Bool(false));
    Ok(changed.with_body(StatusCode::ACCEPTED, &body))
}

fn response(status: StatusCode, tenant: &TenantRecord) -> StoredResponse {
    StoredResponse::json(status, tenant).with_header(ETAG, etag::of(tenant.version, tenant.updated_at))
}
