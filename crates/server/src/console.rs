//! The web console: static files in the binary, under `/console/`, and what they need to know of the settings.
//!
//! The console is a client of the HTTP API like any other. Its files show no data, so they need no authentication.

mod files;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Extension, Router, middleware};
use http_kit::admission::response_budget::SharedBody;
use http_kit::extract::Path;
use http_kit::problem::Problem;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use files::{EMBEDDED, Files, is_current};

use crate::settings::{ConsoleSettings, Role, Settings};

/// The page of a server that was built without the console.
const NOT_BUILT: &str = "<!doctype html>
<html lang=\"en\">
<head><meta charset=\"utf-8\"><title>Pillarbox console</title></head>
<body>
<h1>The console is not part of this build</h1>
<p>Install Node.js 18 or newer (on Debian and Ubuntu: apt-get install nodejs npm), stop Pillarbox, and run
<code>make run</code> in its source folder. It builds the console first.</p>
<p>The <a href=\"/docs/\">HTTP API</a> and the command line work without it.</p>
</body>
</html>
";
/// The page itself. Its own links begin with `#`, so the server knows one page.
const PAGE: &str = "index.html";

/// What the routes of the console need.
struct Console {
    files: Files,
    policy: HeaderValue,
    config: ConsoleConfig,
}

/// What the console shows of the settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
struct ConsoleConfig {
    /// The name of the installation.
    #[schema(example = "Pillarbox")]
    name: String,
    /// The accent colour, as `#rrggbb` or `#rgb`.
    #[schema(example = "#b3261e", pattern = "^#([0-9A-Fa-f]{3}|[0-9A-Fa-f]{6})$")]
    colour: String,
}

/// Where the root leads to: the console, if this process has one, or else the API documentation.
pub(crate) fn start_page(settings: &Settings) -> &'static str {
    let has_console = settings.console.enabled && settings.roles().contains(Role::Api) && !EMBEDDED.is_empty();
    if has_console { "/console/" } else { "/docs/" }
}

/// The routes of the console. None if the settings disable it.
pub(crate) fn router(settings: &ConsoleSettings) -> Router {
    if !settings.enabled {
        return Router::new();
    }
    routes_with(settings, EMBEDDED)
}

/// The routes for the OpenAPI document.
pub(crate) fn described() -> utoipa::openapi::OpenApi {
    described_router().into_openapi()
}

fn described_router() -> OpenApiRouter<Arc<Console>> {
    OpenApiRouter::new().routes(routes!(console_config))
}

fn routes_with(settings: &ConsoleSettings, files: &[(&'static str, &'static [u8])]) -> Router {
    let console = Arc::new(Console {
        files: Files::new(files),
        policy: policy(settings),
        config: ConsoleConfig { name: settings.name.clone(), colour: settings.colour.clone() },
    });
    let router = Router::from(described_router())
        .route("/console", get(|| async { Redirect::permanent("/console/") }))
        .route("/console/", get(page))
        .route("/console/{*file}", get(file));
    router.layer(middleware::map_response_with_state(console.clone(), secure)).with_state(console)
}

/// Scripts and styles of this server only, and no page of another origin around it except those of the settings.
fn policy(settings: &ConsoleSettings) -> HeaderValue {
    let ancestors = match settings.frame_ancestors.as_slice() {
        [] => "'none'".to_owned(),
        origins => origins.join(" "),
    };
    let policy = format!(
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
    );
    // The check of the settings accepts only origins that fit into a header.
    HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"))
}

async fn secure(State(console): State<Arc<Console>>, mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, console.policy.clone());
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// Get the name and the colour that the console shows
#[utoipa::path(get, path = "/console/config.json", operation_id = "getConsoleSettings", tag = "server", responses((status = 200, body = ConsoleConfig)))]
async fn console_config(State(console): State<Arc<Console>>) -> Response {
    let headers = [(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"))];
    (headers, axum::Json(console.config.clone())).into_response()
}

async fn page(State(console): State<Arc<Console>>, headers: HeaderMap) -> Response {
    let no_cache = (header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    let html = (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    match respond(&console, PAGE, &headers) {
        Some(response) => response,
        None => ([no_cache, html], Bytes::from_static(NOT_BUILT.as_bytes())).into_response(),
    }
}

async fn file(
    State(console): State<Arc<Console>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let missing = || Problem::not_found("unknown-route", format!("the console has no file {name}; it is at /console/"));
    respond(&console, &name, &headers).ok_or_else(missing)
}

/// The file of this name, or 304 if the client has it already. None: there is no such file.
fn respond(console: &Console, name: &str, request: &HeaderMap) -> Option<Response> {
    let (variant, headers) = console.files.find(name)?.variant(request);
    if is_current(request, &variant.etag) {
        return Some((StatusCode::NOT_MODIFIED, headers).into_response());
    }
    Some((headers, Extension(SharedBody), variant.bytes.clone()).into_response())
}

#[cfg(test)]
mod tests;
