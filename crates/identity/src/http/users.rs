//! Users, for operators.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::extract::Path;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use serde::Deserialize;
use service::idempotency::StoreResponse;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{CurrentOperator, IDEMPOTENCY_KEY, run_ending_sessions};
use crate::Identity;
use crate::domain::Role;
use crate::flow::role as flow;
use crate::view::{AccountView, RoleView};

pub(super) fn router() -> OpenApiRouter<Arc<Identity>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(set_role))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct UserFilters {
    /// Only users whose address begins with this text; case does not matter.
    email: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewUserRole, example = json!({"role": "admin"}))]
struct NewRole {
    role: Role,
}

/// List users, newest first
///
/// For admins of the tenant `main`.
#[utoipa::path(get, path = "/identity/v1/users", operation_id = "listAccounts", tag = "identity", params(Listing<UserFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<AccountView>)))]
async fn list(
    State(identity): State<Arc<Identity>>,
    CurrentOperator(_): CurrentOperator,
    Listing { filters, limit, cursor }: Listing<UserFilters>,
) -> Result<Page<AccountView>, Problem> {
    let scope = PageScope::global(&identity.cursor_key, "identity users", &filters);
    let before: Option<Uuid> = scope.position(cursor.as_deref())?;
    let prefix = filters.email.map(|email| email.trim().to_lowercase());
    let accounts = flow::list(&identity, prefix.as_deref(), before, limit + 1).await?;
    Ok(scope.cut(accounts, limit, |account| account.id).map(AccountView::from))
}

/// Set the role of a user
///
/// For admins of the tenant `main`. The new role is in tokens that are signed from now on. A user who is no longer an admin
/// is signed out.
#[utoipa::path(put, path = "/identity/v1/users/{id}/role", operation_id = "setUserRole", tag = "identity", request_body = NewRole,
    params(("id" = Uuid, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = RoleView), (status = 404, description = "The user does not exist")))]
async fn set_role(
    State(identity): State<Arc<Identity>>,
    CurrentOperator(caller): CurrentOperator,
    Path(id): Path<Uuid>,
    Mutation { body: JsonBody(NewRole { role }), identity: request }: Mutation<JsonBody<NewRole>>,
) -> Result<StoredResponse, Problem> {
    let now = identity.clock.now();
    run_ending_sessions(&identity, request.as_ref(), StoreResponse::WithBody, |tx, ended| {
        Box::pin(async move {
            flow::set(tx, id, role, &caller.principal.to_string(), &ended, now).await?;
            Ok(StoredResponse::json(StatusCode::OK, &RoleView { id, role }))
        })
    })
    .await
}
