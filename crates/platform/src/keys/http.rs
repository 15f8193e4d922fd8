use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use kit::auth::{Caller, Role, Tenant};
use kit::extract::Path;
use kit::idempotency::{Answer, JsonBody, Mutation};
use kit::page::{Listing, Page};
use kit::problem::Problem;
use mailbox::idempotency::{self, Keep};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{ApiKey, NewKey, flow};
use crate::app::App;

pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(revoke))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CreateKey {
    /// What it is for.
    #[schema(min_length = 1, max_length = 100, example = "orders service")]
    name: String,
    role: Role,
    /// Your own when absent.
    tenant: Option<Tenant>,
    #[serde(default, deserialize_with = "kit::instant::optional")]
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, ToSchema)]
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
    /// Only this tenant's.
    tenant: Option<Tenant>,
}

/// List API keys, newest first
#[utoipa::path(get, path = "/admin/v1/keys", tag = "admin", params(Listing<KeyFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<ApiKey>)))]
async fn list(
    State(app): State<App>,
    caller: Caller,
    Listing { filters, limit, cursor }: Listing<KeyFilters>,
) -> Result<Page<ApiKey>, Problem> {
    let tenant = governed(&caller, filters.tenant)?;
    let scope = format!("keys?tenant={}", tenant.as_ref().map_or("*", Tenant::as_str));
    let before = cursor.map(|cursor| app.cursor_key.open(&scope, &cursor)).transpose()?;
    let keys = flow::list(&app.db, tenant.as_ref(), before, limit + 1).await?;
    Ok(Page::cut(keys, limit, &app.cursor_key, &scope, |key| key.id))
}

/// Make an API key; the answer is the only place that shows it
#[utoipa::path(post, path = "/admin/v1/keys", tag = "admin", request_body = CreateKey,
    params(("idempotency-key" = Option<String>, Header, description = "Repeating a request with the same key does nothing more")), security(("bearer" = [])),
    responses((status = 201, body = CreatedKey)))]
async fn create(
    State(app): State<App>,
    caller: Caller,
    request: Mutation<JsonBody<CreateKey>>,
) -> Result<Answer, Problem> {
    caller.require(Role::Admin)?;
    let Mutation { body: JsonBody(body), identity } = request;
    let tenant = body.tenant.unwrap_or_else(|| caller.tenant.clone());
    governed(&caller, Some(tenant.clone()))?;
    let new = NewKey { name: body.name, role: body.role, tenant, expires_at: body.expires_at };
    let now = app.clock.now();
    idempotency::once(&app.db, identity.as_ref(), Keep::NoAnswer, now, |tx| {
        Box::pin(async move {
            let (details, secret) = flow::create(tx, new, now).await?;
            Ok(Answer::json(StatusCode::CREATED, &CreatedKey { key: secret.reveal().clone(), details }))
        })
    })
    .await
}

/// Revoke an API key
#[utoipa::path(delete, path = "/admin/v1/keys/{id}", tag = "admin", params(("id" = Uuid, Path)), security(("bearer" = [])),
    responses((status = 204, description = "It is revoked, now or before"), (status = 404, description = "There is no such key")))]
async fn revoke(State(app): State<App>, caller: Caller, Path(id): Path<Uuid>) -> Result<impl IntoResponse, Problem> {
    let tenant = governed(&caller, None)?;
    flow::revoke(&app.db, id, tenant.as_ref(), app.clock.now()).await?;
    app.keys.forget_all();
    Ok(StatusCode::NO_CONTENT)
}

/// The tenant whose keys the caller may manage and asks for; None is all of them.
fn governed(caller: &Caller, asked: Option<Tenant>) -> Result<Option<Tenant>, Problem> {
    caller.require(Role::Admin)?;
    match asked {
        asked if caller.is_operator() => Ok(asked),
        Some(other) if other != caller.tenant => Err(Problem::forbidden("this key manages its own tenant only")),
        _ => Ok(Some(caller.tenant.clone())),
    }
}
