//! The HTTP API as a whole: the router of this process, and the OpenAPI description of all routes.

use std::convert::Infallible;
use std::sync::Arc;

use admin::{Administration, audit};
use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{Route, get};
use http_kit::auth::{Authenticator, authenticate};
use http_kit::openapi;
use service::{Role, Service};
use tower::layer::layer_fn;
use tower::service_fn;
use utoipa::OpenApi;
use utoipa::openapi::tag::TagBuilder;
use utoipa_axum::router::OpenApiRouter;

use crate::console;
use crate::server_routes::{self, ServerState};
use crate::services::{BuiltService, ServiceList};
use crate::settings::Settings;

/// The routes that this process serves: the server routes always, the API only with the role `api`.
pub(crate) fn router(
    settings: &Settings,
    state: ServerState,
    admin: Arc<Administration>,
    services: Vec<Arc<dyn BuiltService>>,
    authenticator: Authenticator,
) -> Router {
    let start_page = console::start_page(settings);
    let open = Router::from(server_routes::router().with_state(state))
        .route("/", get(move || async move { Redirect::temporary(start_page) }));
    if !settings.roles().contains(Role::Api) {
        return open;
    }
    let open = open.merge(console::router(&settings.console));
    let mut of_admin = Administration::routes();
    if settings.has_service(hub::NAME) {
        of_admin = of_admin.merge(Administration::hub_routes());
    }
    let of_admin = Router::from(of_admin.with_state(admin.clone()));
    let api = services.into_iter().fold(of_admin, |api, service| api.merge(service.router()));
    let state = Arc::new((authenticator, admin));
    // Not `from_fn`, for the reason that `http_kit::web` gives. The route is cloned, because it is called after the authentication.
    let admitted = layer_fn(move |route: Route| {
        let state = Arc::clone(&state);
        service_fn(move |request| admit(Arc::clone(&state), route.clone(), request))
    });
    open.merge(api.layer(admitted))
}

/// The middleware of the API: authenticates the request, and records it if it acts for a tenant. One layer, because each one
/// costs a request some allocations.
async fn admit(
    state: Arc<(Authenticator, Arc<Administration>)>,
    route: Route,
    request: Request,
) -> Result<Response, Infallible> {
    let (authenticator, admin) = &*state;
    let response =
        authenticate(authenticator, request, async |request| audit::audit(admin.audit_trail(), request, route).await);
    Ok(response.await.unwrap_or_else(IntoResponse::into_response))
}

/// What all operations have in common.
const INTRODUCTION: &str = "\
A reliable event platform on PostgreSQL.

**Authentication.** `Authorization: Bearer <credentials>`. Producers and operators have API keys (`pbx_...`; an operator creates \
them with `createApiKey` or `pillarbox key create`), users have JWTs (from `signIn`, `pillarbox token` or a configured issuer), and \
employees of a tenant have portal tokens (`pbxp_...`). Operations without a lock need no credentials.

**Errors** are problem documents (RFC 9457) with a stable `type`; `errors` names each invalid field by a JSON pointer.

**Repeats.** A change with an `Idempotency-Key` takes effect once: a repeat within 24 hours gets the stored response with the header \
`Idempotent-Replayed: true`, and another request with the same key is refused (422). The key counts for its caller and tenant. \
Repeat after 503, and after a connection that broke.

**Pages.** A list returns `items` and, if there are more, `next_cursor`: pass it as `cursor`, with the same filters. `limit` is 20 \
by default and at most 100.

**Versions.** Where a response has an `ETag`, `If-Match` makes a change conditional (412 if the resource has changed), and \
`If-None-Match` saves a response that is cached (304).

**Limits.** 429 and 503 say in `Retry-After` when to try again.

**Words.** An *event* is posted to the hub or in SQL. What people join is called a *gathering* in the names of operations and \
schemas.";

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Pillarbox",
        description = INTRODUCTION,
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    servers((url = "/", description = "This server")),
    tags((name = "server", description = "Health, readiness, metrics and this description. No authentication."))
)]
struct Description;

/// The OpenAPI description of every route, independent of the roles and services of this process.
pub fn api_description(services: ServiceList) -> utoipa::openapi::OpenApi {
    let mut described = Description::openapi();
    let of_admin =
        [(Administration::NAME, Administration::DESCRIPTION), (admin::OPERATOR_TAG, admin::OPERATOR_DESCRIPTION)];
    let tag = |(name, description)| TagBuilder::new().name(name).description(Some(description)).build();
    described.tags.get_or_insert_default().extend(of_admin.map(tag));
    let of_server = OpenApiRouter::with_openapi(described).merge(server_routes::router()).into_openapi();
    let of_admin = Administration::routes().merge(Administration::hub_routes()).into_openapi();
    let mut described = of_server;
    described.merge(of_admin);
    described.merge(console::described());
    for service in services {
        described.merge(service.describe());
    }
    openapi::complete(&mut described);
    described
}
