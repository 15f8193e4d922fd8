//! Errors as people and programs see them: RFC 9457 `application/problem+json`.
//!
//! A service has one error enum and one `From<Error> for Problem`; what is not for the caller's eyes is
//! logged here, once, and answered as `internal`.

use std::fmt::Display;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;
use utoipa::ToSchema;

use crate::trace::TraceContext;

pub const CONTENT_TYPE: &str = "application/problem+json";

/// An error answer. `type` is stable and meant for programs, `detail` is meant for people.
#[derive(Debug, Clone)]
pub struct Problem(Box<Parts>);

/// Boxed, so that a `Result` with a problem in it stays small.
#[derive(Debug, Clone)]
struct Parts {
    status: StatusCode,
    code: &'static str,
    detail: String,
    errors: Vec<FieldError>,
    headers: HeaderMap,
}

/// One thing wrong with the request: where it stands and what it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct FieldError {
    /// The part of the request that `pointer` points into.
    #[serde(rename = "in")]
    pub place: Place,
    /// A JSON pointer (RFC 6901); empty for the whole part.
    #[schema(example = "/name")]
    pub pointer: String,
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    Body,
    Path,
    Query,
    Header,
}

/// The body as it travels.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Problem)]
pub struct ProblemBody<'a> {
    /// Stable name of the kind of problem.
    #[serde(rename = "type")]
    #[schema(example = "urn:pillarbox:problem:validation-failed")]
    pub kind: String,
    pub title: &'a str,
    pub status: u16,
    pub detail: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub errors: &'a [FieldError],
    /// Quote it when you ask for help: the server's log has it too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

impl Problem {
    pub fn new(status: StatusCode, code: &'static str, detail: impl Display) -> Problem {
        let parts = Parts { status, code, detail: detail.to_string(), errors: Vec::new(), headers: HeaderMap::new() };
        Problem(Box::new(parts))
    }

    pub fn bad_request(code: &'static str, detail: impl Display) -> Problem {
        Problem::new(StatusCode::BAD_REQUEST, code, detail)
    }

    pub fn not_found(code: &'static str, detail: impl Display) -> Problem {
        Problem::new(StatusCode::NOT_FOUND, code, detail)
    }

    pub fn conflict(code: &'static str, detail: impl Display) -> Problem {
        Problem::new(StatusCode::CONFLICT, code, detail)
    }

    pub fn forbidden(detail: impl Display) -> Problem {
        Problem::new(StatusCode::FORBIDDEN, "forbidden", detail)
    }

    /// 401 with the challenge that RFC 9110 requires.
    pub fn unauthorized(detail: impl Display) -> Problem {
        Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
            .with_header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"pillarbox\""))
    }

    /// The request is well formed, but these fields are not what they should be.
    pub fn validation(errors: Vec<FieldError>) -> Problem {
        let detail = match errors.as_slice() {
            [one] if one.pointer.is_empty() => one.detail.clone(),
            [one] => format!("{}: {}", one.pointer.trim_start_matches('/'), one.detail),
            many => format!("{} fields are not valid", many.len()),
        };
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "validation-failed", detail).with_errors(errors)
    }

    /// Too much at once: the caller should come back after `wait`.
    pub fn overloaded(detail: impl Display, wait: Duration) -> Problem {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", detail).retry_after(wait)
    }

    /// Logs the cause and hides it from the caller.
    pub fn internal(cause: &dyn Display) -> Problem {
        tracing::error!(error = %cause, "request failed");
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "something went wrong on our side; the log has the cause under this trace id",
        )
    }

    /// A dependency is away: logs the cause, asks the caller to come back.
    pub fn unavailable(cause: &dyn Display) -> Problem {
        tracing::warn!(error = %cause, "dependency unavailable");
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable",
            "a dependency is not available; /readyz says which",
        )
        .retry_after(Duration::from_secs(1))
    }

    pub fn with_errors(mut self, errors: Vec<FieldError>) -> Problem {
        self.0.errors = errors;
        self
    }

    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Problem {
        self.0.headers.insert(name, value);
        self
    }

    pub fn retry_after(self, wait: Duration) -> Problem {
        let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
        self.with_header(header::RETRY_AFTER, HeaderValue::from(seconds))
    }

    pub fn status(&self) -> StatusCode {
        self.0.status
    }

    pub fn code(&self) -> &'static str {
        self.0.code
    }

    pub fn errors(&self) -> &[FieldError] {
        &self.0.errors
    }

    pub fn to_json(&self) -> Vec<u8> {
        let body = ProblemBody {
            kind: format!("urn:pillarbox:problem:{}", self.0.code),
            title: self.0.status.canonical_reason().unwrap_or("Error"),
            status: self.0.status.as_u16(),
            detail: &self.0.detail,
            errors: &self.0.errors,
            trace_id: TraceContext::current().map(|trace| trace.trace_id()),
        };
        // A struct of strings and numbers always serialises; an empty body is the honest fallback.
        serde_json::to_vec(&body).unwrap_or_default()
    }
}

impl FieldError {
    pub fn body(pointer: impl Into<String>, detail: impl Display) -> FieldError {
        FieldError { place: Place::Body, pointer: pointer.into(), detail: detail.to_string() }
    }

    pub fn at(place: Place, pointer: impl Into<String>, detail: impl Display) -> FieldError {
        FieldError { place, pointer: pointer.into(), detail: detail.to_string() }
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.0.status.as_u16(), self.0.code, self.0.detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let content_type = [(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE))];
        let body = self.to_json();
        (self.0.status, content_type, self.0.headers, body).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(problem: &Problem) -> serde_json::Value {
        serde_json::from_slice(&problem.to_json()).unwrap()
    }

    #[test]
    fn a_problem_names_its_kind_status_and_fields() {
        let problem = Problem::validation(vec![FieldError::body("/name", "must not be empty")]);
        let body = json(&problem);
        assert_eq!(body["type"], "urn:pillarbox:problem:validation-failed");
        assert_eq!(body["status"], 422);
        assert_eq!(body["detail"], "name: must not be empty");
        assert_eq!(body["errors"][0]["in"], "body");
        assert_eq!(body["errors"][0]["pointer"], "/name");
    }

    #[test]
    fn an_internal_problem_hides_its_cause() {
        let body = json(&Problem::internal(&"password=hunter2"));
        assert!(!body.to_string().contains("hunter2"));
    }

    #[test]
    fn retry_after_is_whole_seconds_and_never_zero() {
        let response = Problem::overloaded("full", Duration::from_millis(20)).into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }
}
