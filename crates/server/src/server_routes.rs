//! The routes about the server itself: health, readiness, metrics and the API documentation. They need no authentication,
//! because they show no tenant's data.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use admin::schemas::ReadinessCheck;
use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use http_kit::admission::response_budget::SharedBody;
use http_kit::extract::{Json, Path};
use http_kit::problem::Problem;
use runtime::health::{Health, State as Condition};
use runtime::telemetry::PrometheusHandle;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

/// What these routes show.
#[derive(Clone)]
pub(crate) struct ServerState {
    health: Health,
    installation: Uuid,
    metrics: PrometheusHandle,
    /// The OpenAPI description as JSON; rendered once.
    description: Arc<LazyLock<Bytes, Box<dyn FnOnce() -> Bytes + Send>>>,
}

impl ServerState {
    pub(crate) fn new(
        health: &Health,
        installation: Uuid,
        metrics: PrometheusHandle,
        describe: impl FnOnce() -> OpenApi + Send + 'static,
    ) -> ServerState {
        // A description always serializes: it consists of strings, lists and maps with strings as keys.
        let render = || Bytes::from(describe().to_json().unwrap_or_default());
        let description = Arc::new(LazyLock::new(Box::new(render) as Box<dyn FnOnce() -> Bytes + Send>));
        ServerState { health: health.clone(), installation, metrics, description }
    }
}

pub(crate) fn router() -> OpenApiRouter<ServerState> {
    OpenApiRouter::new()
        .routes(routes!(healthz))
        .routes(routes!(readyz))
        .routes(routes!(metrics))
        .routes(routes!(openapi))
        .route("/docs", get(|| async { Redirect::permanent("/docs/") }))
        .route("/docs/", get(|| docs(Path(String::new()))))
        .route("/docs/{*file}", get(docs))
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Health)]
struct Alive {
    #[schema(example = "alive")]
    status: &'static str,
    version: &'static str,
    /// The id of the installation, which its database has. It is random and grants nothing; commands compare it with that of a
    /// database.
    installation: Uuid,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Readiness {
    /// All dependencies are up.
    Ready,
    /// The process serves requests, but an optional dependency is down.
    Degraded,
    /// The process cannot serve requests.
    Unready,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ReadinessReport)]
pub(crate) struct Report {
    status: Readiness,
    #[schema(value_type = Vec<ReadinessCheck>)]
    pub(crate) checks: Vec<Condition>,
}

/// Check that the process is alive
#[utoipa::path(get, path = "/healthz", operation_id = "getHealth", tag = "server", responses((status = 200, body = Alive)))]
async fn healthz(State(server): State<ServerState>) -> Json<Alive> {
    Json(Alive { status: "alive", version: env!("CARGO_PKG_VERSION"), installation: server.installation })
}

/// Check that the process can serve requests, and list its dependencies
#[utoipa::path(get, path = "/readyz", operation_id = "getReadiness", tag = "server", responses(
    (status = 200, body = Report, description = "The process serves requests; with the status `degraded`, `checks` shows which dependency is down"),
    (status = 503, body = Report, description = "The process cannot serve requests: a required dependency is down")))]
async fn readyz(State(server): State<ServerState>) -> (StatusCode, Json<Report>) {
    let checks = server.health.report();
    let status = if checks.iter().any(|check| check.required && !check.up) {
        Readiness::Unready
    } else if checks.iter().any(|check| !check.up) {
        Readiness::Degraded
    } else {
        Readiness::Ready
    };
    let code = if status == Readiness::Unready { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (code, Json(Report { status, checks }))
}

/// Get the metrics for Prometheus
#[utoipa::path(get, path = "/metrics", operation_id = "getMetrics", tag = "server",
    responses((status = 200, body = String, content_type = "text/plain; version=0.0.4")))]
async fn metrics(State(server): State<ServerState>) -> Response {
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, content_type)], server.metrics.render()).into_response()
}

/// Get the OpenAPI description of this API
#[utoipa::path(get, path = "/openapi.json", operation_id = "getApiDescription", tag = "server", responses((status = 200, body = Object)))]
async fn openapi(State(server): State<ServerState>) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], Extension(SharedBody), Bytes::clone(&server.description)).into_response()
}

/// The rendered API documentation. The binary contains all of its files.
async fn docs(Path(file): Path<String>) -> Result<Response, Problem> {
    static CONFIG: LazyLock<Arc<utoipa_swagger_ui::Config<'static>>> = LazyLock::new(|| {
        Arc::new(
            utoipa_swagger_ui::Config::from("/openapi.json").persist_authorization(true).display_request_duration(true),
        )
    });
    let found = utoipa_swagger_ui::serve(&file, CONFIG.clone()).map_err(|error| Problem::internal(&error))?;
    let file = found.ok_or_else(|| Problem::not_found("unknown-route", "there is no such documentation page"))?;
    let content_type = file.content_type.parse().map_err(|error| Problem::internal(&error))?;
    // The page may load resources from this server only.
    let policy = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'";
    let headers = HeaderMap::from_iter([
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy)),
    ]);
    // Files are part of the binary and served without a copy, except for the page whose title is replaced.
    Ok(match file.bytes {
        Cow::Borrowed(bytes) if file.content_type.starts_with("text/html") => {
            let page = String::from_utf8_lossy(bytes).replace("<title>Swagger UI</title>", "<title>Pillarbox</title>");
            (headers, page).into_response()
        }
        Cow::Borrowed(bytes) => (headers, Extension(SharedBody), Bytes::from_static(bytes)).into_response(),
        Cow::Owned(bytes) => (headers, bytes).into_response(),
    })
}
