//! The layers around every route: trace, metrics, limits, the memory of responses, panics, and problems for unknown routes.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::response::{IntoResponse, Response};
use axum::routing::Route;
use axum::routing::future::RouteFuture;
use futures_util::FutureExt;
use http::{HeaderValue, Method, StatusCode, Uri, Version, header};
use metrics::{Counter, Histogram};
use tokio::sync::watch;
use tower::layer::layer_fn;
use tower::{Service, service_fn};
use tracing::Instrument;

use crate::admission::body_budget;
use crate::admission::caller_id::CallerId;
use crate::admission::response_budget::{Recipient, ResponseBudget};
use crate::client_address::ClientAddress;
use crate::extract::{BodyLimits, RequestLimits};
use crate::header::single_header;
use crate::page::link_next;
use crate::problem::Problem;
use runtime::deadline;
use runtime::health::Health;
use runtime::telemetry::{REQUEST_TARGET, join_trace};
use runtime::trace::TraceContext;
use runtime::worker::panic_text;

/// A request that has waited this long when connections turn out to be dead probably waits for one of them. A later one does
/// not: its connection was tested before its use.
const SUSPECT_AFTER: Duration = Duration::from_secs(2);

/// Wraps the complete router. All its error responses are problems. `health` announces when connections are dead:
/// requests that wait for them are answered at once.
pub fn finish(router: Router, limits: RequestLimits, health: &Health) -> Router {
    let state = Arc::new(LayerState {
        body_limits: BodyLimits::new(limits),
        responses: ResponseBudget::new(limits.response_bytes_total_max),
        metrics: RequestMetrics::default(),
        lost_connections: health.lost_connections(),
    });
    // Not `from_fn`: for each request it clones the route and the state once more, and boxes both and the future.
    let observed = layer_fn(move |mut route: Route| {
        let state = Arc::clone(&state);
        service_fn(move |request| observe(&state, &mut route, request))
    });
    router.fallback(unknown_route).method_not_allowed_fallback(wrong_method).layer(observed)
}

struct LayerState {
    body_limits: BodyLimits,
    responses: ResponseBudget,
    metrics: RequestMetrics,
    lost_connections: watch::Receiver<u64>,
}

/// Counts responses. Looking up a metric by its labels costs more than incrementing it, so the handles are cached by
/// route.
#[derive(Default)]
struct RequestMetrics(RwLock<HashMap<String, Vec<Series>>>);

/// The metrics of one route, method and status.
struct Series {
    method: &'static str,
    status: u16,
    requests: Counter,
    durations: Histogram,
}

impl RequestMetrics {
    fn count(&self, method: &'static str, route: &str, status: u16, elapsed: Duration) {
        let is_wanted = |series: &&Series| series.method == method && series.status == status;
        {
            let routes = self.0.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(series) = routes.get(route).and_then(|of_route| of_route.iter().find(is_wanted)) {
                return series.count(elapsed);
            }
        }
        let labels = [("method", method.to_owned()), ("route", route.to_owned()), ("status", status.to_string())];
        let requests = metrics::counter!("pillarbox_http_requests_total", &labels);
        let durations = metrics::histogram!("pillarbox_http_request_duration_seconds", &labels[..2]);
        let new = Series { method, status, requests, durations };
        new.count(elapsed);
        let mut routes = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let of_route = routes.entry(route.to_owned()).or_default();
        if !of_route.iter().any(|series| is_wanted(&series)) {
            of_route.push(new);
        }
    }
}

impl Series {
    fn count(&self, elapsed: Duration) {
        self.requests.increment(1);
        self.durations.record(elapsed.as_secs_f64());
    }
}

async fn unknown_route(uri: Uri) -> Problem {
    Problem::not_found("unknown-route", format!("there is no route {}; /docs lists the API", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} does not support {method}; the header Allow lists the supported methods", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", detail)
}

/// Passes a request on to its route. The route is called here and not in the future, which could not borrow it; nothing of it
/// runs before the future is polled.
fn observe(
    state: &Arc<LayerState>,
    route: &mut Route,
    mut request: Request,
) -> impl Future<Output = Result<Response, Infallible>> + use<> {
    let started = Instant::now();
    let state = Arc::clone(state);
    request.extensions_mut().insert(state.body_limits.clone());
    let trace = incoming_trace(&request);
    let method = method_label(request.method());
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let uri = request.uri().clone();
    let client = request.extensions().get::<ClientAddress>().copied();
    let checked = check_host(&request);
    let responding = route.call(request);
    async move {
        let LayerState { body_limits, responses, metrics, lost_connections } = &*state;
        // The pattern of the route, never the URI: ids and queries would leak into the metrics and make their number
        // unbounded.
        let route = matched.as_ref().map_or("unknown", MatchedPath::as_str);
        // The span is enabled only for the export of traces and for debugging, because it costs more than a small
        // request.
        let span = tracing::debug_span!(target: REQUEST_TARGET, "request", method, route);
        join_trace(&span, trace);
        let responding = async {
            let responding = pin!(respond(checked, responding, body_limits.limits, method, route));
            let mut lost_connections = lost_connections.clone();
            let responding = deadline::unless_connections_are_lost(&mut lost_connections, SUSPECT_AFTER, responding);
            let response = responding.await.unwrap_or_else(|| {
                let cause = format!("{method} {route}: the connection to the database is probably dead");
                Problem::unavailable(&cause).into_response()
            });
            let network = CallerId::of_network(client);
            let caller = response.extensions().get::<CallerId>().copied().unwrap_or(network);
            let response = responses.apply(Recipient { caller, network }, response);
            let (status, elapsed) = (response.status(), started.elapsed());
            match status {
                // The cause was logged where it was found, under the same trace unless the failed batch was shared by
                // many requests.
                StatusCode::INTERNAL_SERVER_ERROR => {
                    tracing::error!(target: REQUEST_TARGET, method, route, ?elapsed, "answered 500")
                }
                _ => tracing::debug!(target: REQUEST_TARGET, status = status.as_u16(), ?elapsed, "answered"),
            }
            metrics.count(method, route, status.as_u16(), elapsed);
            response
        };
        let mut response = trace.scope(responding).instrument(span).await;

        link_next(&uri, &mut response);
        response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        Ok(response)
    }
}

/// Returns the response of the route, or a problem if the request was refused or the route panics or exceeds the time limit.
async fn respond(
    checked: Result<(), Problem>,
    responding: RouteFuture<Infallible>,
    limits: RequestLimits,
    method: &str,
    route: &str,
) -> Response {
    if let Err(problem) = checked {
        return problem.into_response();
    }
    // A dependency that hangs must not block the request, and the resources it uses, for ever.
    // A client that closes its connection drops the request at any time.
    let responding = AssertUnwindSafe(body_budget::scope(responding)).catch_unwind();
    match deadline::within(limits.request_time_max, deadline::droppable(responding)).await {
        Ok(Ok(response)) => response.unwrap_or_else(|never| match never {}),
        Ok(Err(panic)) => Problem::internal(&format!("panic: {}", panic_text(&*panic))).into_response(),
        Err(_) => {
            let cause = format!("{method} {route}: no response within {:?}", limits.request_time_max);
            Problem::unavailable(&cause).into_response()
        }
    }
}

/// RFC 9112: an HTTP/1.1 request has exactly one Host header. Two are used for request smuggling.
fn check_host(request: &Request) -> Result<(), Problem> {
    let present = single_header(request.headers(), &header::HOST)?.is_some();
    if present || request.version() != Version::HTTP_11 {
        return Ok(());
    }
    Err(Problem::bad_request("malformed-header", "host: an HTTP/1.1 request must have this header"))
}

fn incoming_trace(request: &Request) -> TraceContext {
    let given = request.headers().get("traceparent").and_then(|value| value.to_str().ok()?.parse().ok());
    given.unwrap_or_else(TraceContext::start)
}

/// Returns the method as a label of metrics. A client can send any token as the method, so the set of labels is
/// fixed.
fn method_label(method: &Method) -> &'static str {
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
        let response = finish(router, limits, &Health::default())
            .oneshot(request.header("host", "x").body(Body::empty()).unwrap())
            .await
            .unwrap();
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
    async fn a_handler_that_exceeds_the_time_limit_gets_a_503() {
        let (parts, _) = call(Request::builder().uri("/hang")).await;
        assert_eq!(parts.status, StatusCode::SERVICE_UNAVAILABLE);
    }

    #[tokio::test]
    async fn a_second_host_header_is_rejected() {
        let (parts, _) = call(Request::builder().uri("/ok").header("host", "y")).await;
        assert_eq!(parts.status, StatusCode::BAD_REQUEST);
    }

    #[tokio::test]
    async fn the_trace_of_the_caller_is_continued() {
        let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let (_, body) = call(Request::builder().uri("/nowhere").header("traceparent", traceparent)).await;
        assert!(body.contains("4bf92f3577b34da6a3ce929d0e0e4736"), "{body}");
    }
}
