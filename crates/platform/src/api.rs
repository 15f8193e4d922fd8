//! The HTTP API as a whole: the router of this process, and the OpenAPI description of all routes.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::Route;
use kit::auth::{Authenticator, authenticate};
use kit::openapi;
use mailbox::service::Role;
use tower::layer::layer_fn;
use tower::service_fn;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::app::App;
use crate::audit::{self, AuditTrail};
use crate::services::{BuiltService, ServiceList};
use crate::settings::Settings;
use crate::{caller, console, keys, operator, overview, portal_tokens, server_routes, tenants};

/// The routes that this process serves: the server routes always, the API only with the role `api`.
pub(crate) fn router(
    settings: &Settings,
    app: App,
    services: Vec<Arc<dyn BuiltService>>,
    authenticator: Authenticator,
    audit_trail: AuditTrail,
) -> Router {
    let open = Router::from(server_routes::router().with_state(app.clone()));
    if !settings.roles().contains(Role::Api) {
        return open;
    }
    let open = open.merge(console::router(&settings.console));
    let mut platform = platform_routes();
    // They are of use only where the hub accepts them.
    if settings.has_service(hub::NAME) {
        platform = platform.merge(portal_tokens::http::router()).merge(caller::router());
    }
    let platform = Router::from(platform.with_state(app));
    let api = services.into_iter().fold(platform, |api, service| api.merge(service.router()));
    let state = Arc::new((authenticator, audit_trail));
    // Not `from_fn`, for the reason that `kit::web` gives. The route is cloned, because it is called after the authentication.
    let admitted = layer_fn(move |route: Route| {
        let state = Arc::clone(&state);
        service_fn(move |request| admit(Arc::clone(&state), route.clone(), request))
    });
    open.merge(api.layer(admitted))
}

/// The middleware of the API: authenticates the request, and records it if it acts for a tenant. One layer, because each one
/// costs a request some allocations.
async fn admit(
    state: Arc<(Authenticator, AuditTrail)>,
    route: Route,
    request: Request,
) -> Result<Response, Infallible> {
    let (authenticator, audit_trail) = &*state;
    let response =
        authenticate(authenticator, request, async |request| audit::audit(audit_trail, request, route).await);
    Ok(response.await.unwrap_or_else(IntoResponse::into_response))
}

/// The authenticated routes of the platform itself that every process with the role `api` serves.
fn platform_routes() -> OpenApiRouter<App> {
    keys::http::router()
        .merge(tenants::http::router())
        .merge(audit::http::router())
        .merge(operator::http::router())
        .merge(overview::router())
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Pillarbox",
        description = "A reliable event platform on PostgreSQL. Errors are problem documents (RFC 9457).",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "server", description = "Health, readiness, metrics and this description. No authentication."),
        (name = "admin", description = "API keys, tenants and the audit trail. Requires the role `admin`, from an API key or an operator's token; for tenants and the audit trail in the tenant `main`."),
        (name = "operator", description = "The log and its consumers. Requires the role `admin` in the tenant `main`."),
    )
)]
struct Description;

/// The OpenAPI description of every route, independent of the roles and services of this process.
pub fn api_description(services: ServiceList) -> utoipa::openapi::OpenApi {
    let platform = OpenApiRouter::with_openapi(Description::openapi());
    let platform = platform.merge(server_routes::router()).merge(platform_routes());
    let mut described = platform.merge(portal_tokens::http::router()).merge(caller::router()).into_openapi();
    described.merge(console::described());
    for service in services {
        described.merge(service.describe());
    }
    openapi::complete(&mut described);
    described
}
