//! The layers around every route: trace, metrics, limits, panics, and what is no route at all.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use http::{HeaderValue, Method, StatusCode, Uri, Version, header};
use metrics::{Counter, Histogram};
use tracing::Instrument;

use crate::extract::{RequestLimits, single_header};
use crate::page::link_next;
use crate::problem::Problem;
use crate::telemetry::join_trace;
use crate::trace::TraceContext;
use crate::worker::panic_text;

/// Whose spans and events are of requests.
pub(crate) const TARGET: &str = module_path!();

/// Wraps a finished router: nothing that it answers is a bare error.
pub fn finish(router: Router, limits: RequestLimits) -> Router {
    router
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Around { limits, tally: Tally::default() }, observe))
}

#[derive(Clone)]
struct Around {
    limits: RequestLimits,
    tally: Tally,
}

/// Counts what was answered. To find a metric by its labels takes longer than to count, so what was found is kept, by route.
#[derive(Clone, Default)]
struct Tally(Arc<RwLock<HashMap<String, Vec<Known>>>>);

struct Known {
    method: &'static str,
    status: u16,
    requests: Counter,
    durations: Histogram,
}

impl Tally {
    fn count(&self, method: &'static str, route: &str, status: u16, elapsed: Duration) {
        let is_it = |known: &&Known| known.method == method && known.status == status;
        {
            let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = known.get(route).and_then(|of_route| of_route.iter().find(is_it)) {
                return known.count(elapsed);
            }
        }
        let labels = [("method", method.to_owned()), ("route", route.to_owned()), ("status", status.to_string())];
        let requests = metrics::counter!("pillarbox_http_requests_total", &labels);
        let durations = metrics::histogram!("pillarbox_http_request_duration_seconds", &labels[..2]);
        let new = Known { method, status, requests, durations };
        new.count(elapsed);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let of_route = known.entry(route.to_owned()).or_default();
        if !of_route.iter().any(|known| is_it(&known)) {
            of_route.push(new);
        }
    }
}

impl Known {
    fn count(&self, elapsed: Duration) {
        self.requests.increment(1);
        self.durations.record(elapsed.as_secs_f64());
    }
}

async fn unknown_route(uri: Uri) -> Problem {
    Problem::not_found("unknown-route", format!("there is nothing at {}; /docs lists what there is", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} does not take {method}; the header Allow says what it takes", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", detail)
}

async fn observe(State(Around { limits, tally }): State<Around>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    request.extensions_mut().insert(limits);
    let trace = incoming_trace(&request);
    let method = known_method(request.method());
    // The route's pattern, never the address itself: ids and queries would leak and explode the metrics.
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let route = matched.as_ref().map_or("unknown", MatchedPath::as_str);
    let uri = request.uri().clone();

    // For who collects traces or debugs; otherwise it is not made, since it costs more than a small request.
    let span = tracing::debug_span!("request", method, route);
    join_trace(&span, trace);
    let answering = async {
        let response = answer(request, next, limits, (method, route)).await;
        let (status, elapsed) = (response.status(), started.elapsed());
        match status {
            // The cause was logged where it was found: under the same trace, but for a batch that many shared.
            StatusCode::INTERNAL_SERVER_ERROR => tracing::error!(method, route, ?elapsed, "answered 500"),
            _ => tracing::debug!(status = status.as_u16(), ?elapsed, "answered"),
        }
        tally.count(method, route, status.as_u16(), elapsed);
        response
    };
    let mut response = trace.scope(answering).instrument(span).await;

    link_next(&uri, &mut response);
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The route's answer, or a problem where there is none.
async fn answer(request: Request, next: Next, limits: RequestLimits, (method, route): (&str, &str)) -> Response {
    if let Err(problem) = check_host(&request) {
        return problem.into_response();
    }
    // A server below that hangs must not hold the request, nor what it holds, for ever.
    let answering = AssertUnwindSafe(next.run(request)).catch_unwind();
    match tokio::time::timeout(limits.request_time_max, answering).await {
        Ok(Ok(response)) => response,
        Ok(Err(panic)) => Problem::internal(&format!("panic: {}", panic_text(&*panic))).into_response(),
        Err(_) => {
            let cause = format!("{method} {route}: no answer within {:?}", limits.request_time_max);
            Problem::unavailable(&cause).into_response()
        }
    }
}

/// RFC 9112: exactly one Host. Two are how one request is made to look like another.
fn check_host(request: &Request) -> Result<(), Problem> {
    let present = single_header(request.headers(), &header::HOST)?.is_some();
    if present || request.version() != Version::HTTP_11 {
        return Ok(());
    }
    Err(Problem::bad_request("malformed-header", "host: an HTTP/1.1 request has one"))
}

fn incoming_trace(request: &Request) -> TraceContext {
    let given = request.headers().get("traceparent").and_then(|value| value.to_str().ok()?.parse().ok());
    given.unwrap_or_else(TraceContext::start)
}

/// A method is any token a stranger likes to send; a metric's label is not.
fn known_method(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::routing::{get, post};
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    async fn call(request: http::request::Builder) -> (http::response::Parts, String) {
        let limits = RequestLimits { request_time_max: Duration::from_millis(200), ..RequestLimits::default() };
        let router = Router::new()
            .route("/ok", get(|| async { "ok" }))
            .route("/hang", get(|| async { std::future::pending::<&str>().await }))
            .route("/panic", post(|| async { panic!("secret-in-panic") as &'static str }));
        let response =
            finish(router, limits).oneshot(request.header("host", "x").body(Body::empty()).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        (parts, String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap())
    }

    #[tokio::test]
    async fn unknown_routes_wrong_methods_and_panics_are_problems() {
        let cases = [("GET", "/nowhere", 404), ("DELETE", "/ok", 405), ("POST", "/panic", 500)];
        for (method, path, status) in cases {
            let (parts, body) = call(Request::builder().method(method).uri(path)).await;
            assert_eq!(parts.status.as_u16(), status);
            assert_eq!(parts.headers[header::CONTENT_TYPE], "application/problem+json");
            assert!(!body.contains("secret-in-panic"));
            if status == 405 {
                assert_eq!(parts.headers[header::ALLOW], "GET,HEAD");
            }
        }
    }

    #[tokio::test]
    async fn a_handler_that_hangs_is_given_up() {
        let (parts, _) = call(Request::builder().uri("/hang")).await;
        assert_eq!(parts.status, StatusCode::SERVICE_UNAVAILABLE);
    }

    #[tokio::test]
    async fn a_second_host_is_refused() {
        let (parts, _) = call(Request::builder().uri("/ok").header("host", "y")).await;
        assert_eq!(parts.status, StatusCode::BAD_REQUEST);
    }

    #[tokio::test]
    async fn the_callers_trace_is_continued() {
        let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let (_, body) = call(Request::builder().uri("/nowhere").header("traceparent", traceparent)).await;
        assert!(body.contains("4bf92f3577b34da6a3ce929d0e0e4736"), "{body}");
    }
}
