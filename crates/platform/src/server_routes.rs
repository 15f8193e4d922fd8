//! The routes about the server itself: health, readiness, metrics and the API documentation. They need no authentication,
//! because they show no tenant's data.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use kit::extract::{Json, Path};
use kit::health::State as Condition;
use kit::problem::Problem;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::App;

pub(crate) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(healthz))
        .routes(routes!(readyz))
        .routes(routes!(metrics))
        .routes(routes!(openapi))
        .route("/", get(|| async { Redirect::temporary("/docs/") }))
        .route("/docs", get(|| async { Redirect::permanent("/docs/") }))
        .route("/docs/", get(|| docs(Path(String::new()))))
        .route("/docs/{*file}", get(docs))
}

#[derive(Debug, Serialize, ToSchema)]
struct Alive {
    #[schema(example = "alive")]
    status: &'static str,
    version: &'static str,
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
pub(crate) struct Report {
    status: Readiness,
    pub(crate) checks: Vec<Condition>,
}

/// Check that the process is alive
#[utoipa::path(get, path = "/healthz", tag = "server", responses((status = 200, body = Alive)))]
async fn healthz() -> Json<Alive> {
    Json(Alive { status: "alive", version: env!("CARGO_PKG_VERSION") })
}

/// Check that the process can serve requests, and list its dependencies
#[utoipa::path(get, path = "/readyz", tag = "server", responses(
    (status = 200, body = Report, description = "The process serves requests; with the status `degraded`, `checks` shows which dependency is down"),
    (status = 503, body = Report, description = "The process cannot serve requests: a required dependency is down")))]
async fn readyz(State(app): State<App>) -> (StatusCode, Json<Report>) {
    let checks = app.health.report();
    let status = match () {
        () if checks.iter().any(|check| check.required && !check.up) => Readiness::Unready,
        () if checks.iter().any(|check| !check.up) => Readiness::Degraded,
        () => Readiness::Ready,
    };
    let code = if status == Readiness::Unready { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (code, Json(Report { status, checks }))
}

/// Get the metrics for Prometheus
#[utoipa::path(get, path = "/metrics", tag = "server",
    responses((status = 200, body = String, content_type = "text/plain; version=0.0.4")))]
async fn metrics(State(app): State<App>) -> Response {
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, content_type)], app.metrics.render()).into_response()
}

/// Get the OpenAPI description of this API
#[utoipa::path(get, path = "/openapi.json", tag = "server", responses((status = 200, body = Object)))]
async fn openapi(State(app): State<App>) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], app.description()).into_response()
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
    let bytes = match file.bytes {
        Cow::Borrowed(bytes) if file.content_type.starts_with("text/html") => {
            let page = String::from_utf8_lossy(bytes).replace("<title>Swagger UI</title>", "<title>Pillarbox</title>");
            Bytes::from(page)
        }
        Cow::Borrowed(bytes) => Bytes::from_static(bytes),
        Cow::Owned(bytes) => Bytes::from(bytes),
    };
    Ok((headers, bytes).into_response())
}
