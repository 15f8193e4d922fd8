//! The HTTP API as a whole: the router of this process, and the OpenAPI description of all routes.

use std::sync::Arc;

use axum::{Router, middleware};
use kit::auth::{Authenticator, authenticate};
use kit::openapi;
use mailbox::service::Role;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::app::App;
use crate::services::{BuiltService, ServiceList};
use crate::settings::Settings;
use crate::{keys, operator, server_routes};

/// The routes that this process serves: the server routes always, the API only with the role `api`.
pub(crate) fn router(
    settings: &Settings,
    app: App,
    services: Vec<Arc<dyn BuiltService>>,
    authenticator: Authenticator,
) -> Router {
    let open = Router::from(server_routes::router().with_state(app.clone()));
    if !settings.roles().contains(Role::Api) {
        return open;
    }
    let platform = Router::from(platform_routes().with_state(app));
    let api = services.into_iter().fold(platform, |api, service| api.merge(service.router()));
    open.merge(api.layer(middleware::from_fn_with_state(authenticator, authenticate)))
}

/// The authenticated routes of the platform itself.
fn platform_routes() -> OpenApiRouter<App> {
    keys::http::router().merge(operator::http::router())
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
        (name = "admin", description = "API keys. Requires the role `admin`, from an API key or an operator's token."),
        (name = "operator", description = "The log and its consumers. Requires the role `admin` in the tenant `main`."),
    )
)]
struct Description;

/// The OpenAPI description of every route, independent of the roles and services of this process.
pub fn api_description(services: ServiceList) -> utoipa::openapi::OpenApi {
    let platform = OpenApiRouter::with_openapi(Description::openapi());
    let mut described = platform.merge(server_routes::router()).merge(platform_routes()).into_openapi();
    for service in services {
        described.merge(service.describe());
    }
    openapi::complete(&mut described);
    described
}
