//! Problems: the error responses of the API, RFC 9457 `application/problem+json`.
//!
//! A service has one error enum and one `From<Error> for Problem`. An internal cause is logged here, once, and the
//! response is `internal` without the cause.

use std::fmt::Display;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;
use utoipa::ToSchema;

use runtime::batch::SubmitError;
use runtime::trace::TraceContext;

pub const CONTENT_TYPE: &str = "application/problem+json";

/// An error response. Programs rely on `type`, which is stable; `detail` explains the error to a reader.
#[derive(Debug, Clone)]
pub struct Problem(Box<Parts>);

/// Boxed, so that a `Result` with a problem stays small.
#[derive(Debug, Clone)]
struct Parts {
    status: StatusCode,
    code: &'static str,
    detail: String,
    errors: Vec<FieldError>,
    headers: HeaderMap,
}

/// One invalid part of the request: its location, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct FieldError {
    /// The part of the request that `pointer` points into.
    #[serde(rename = "in")]
    pub location: Location,
    /// A JSON pointer (RFC 6901); empty for the whole part.
    #[schema(example = "/name")]
    pub pointer: String,
    pub detail: String,
}

/// The errors of one field: a pointer relative to the field, and the detail.
pub type FieldErrors = Vec<(String, String)>;

/// A part of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ErrorLocation)]
pub enum Location {
    Body,
    Path,
    Query,
    Header,
}

/// The JSON body of a problem.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Problem)]
pub struct ProblemBody<'a> {
    /// The stable name of the kind of problem.
    #[serde(rename = "type")]
    #[schema(example = "urn:pillarbox:problem:validation-failed")]
    pub kind: String,
    pub title: &'a str,
    pub status: u16,
    pub detail: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub errors: &'a [FieldError],
    /// Quote it when you ask for help: the server's log contains it.
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

    /// Returns a 401 with the challenge that RFC 9110 requires.
    pub fn unauthorized(detail: impl Display) -> Problem {
        Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
            .with_header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"pillarbox\""))
    }

    /// Returns the 422 of a well-formed request with invalid fields.
    pub fn validation(errors: Vec<FieldError>) -> Problem {
        let detail = match errors.as_slice() {
            [one] if one.pointer.is_empty() => one.detail.clone(),
            [one] => format!("{}: {}", one.pointer.trim_start_matches('/'), one.detail),
            many => format!("{} fields are not valid", many.len()),
        };
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "validation-failed", detail).with_errors(errors)
    }

    /// Returns the 503 of an overloaded server. The caller should try again after `wait`.
    pub fn overloaded(detail: impl Display, wait: Duration) -> Problem {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", detail).retry_after(wait)
    }

    /// Returns the problem of a request that got no result from a batch; `failed` maps the error of the batch itself.
    pub fn of_batch<E>(error: SubmitError<E>, failed: impl FnOnce(&E) -> Problem) -> Problem {
        match error {
            SubmitError::Overloaded => Problem::overloaded("too many requests are waiting", Duration::from_secs(1)),
            SubmitError::Stopped => Problem::overloaded("this server is stopping; try again", Duration::from_secs(1)),
            SubmitError::TooSlow(time_max) => Problem::unavailable(&format!("no result within {time_max:?}")),
            SubmitError::Failed(error) => failed(&error),
            SubmitError::Broken(bug) => Problem::internal(&bug),
        }
    }

    /// Logs the cause and returns a 500 without it.
    pub fn internal(cause: &dyn Display) -> Problem {
        tracing::error!(error = %cause, "request failed");
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "an internal error occurred; the server's log has the cause under this trace id",
        )
    }

    /// Logs the cause and returns a 503 without it: a dependency is unavailable, the caller should try again.
    pub fn unavailable(cause: &dyn Display) -> Problem {
        tracing::warn!(error = %cause, "dependency unavailable");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "a dependency is not available; /readyz names it")
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
        // A struct of strings and numbers always serializes; the fallback is an empty body.
        serde_json::to_vec(&body).unwrap_or_default()
    }
}

impl FieldError {
    pub fn body(pointer: impl Into<String>, detail: impl Display) -> FieldError {
        FieldError { location: Location::Body, pointer: pointer.into(), detail: detail.to_string() }
    }

    pub fn at(location: Location, pointer: impl Into<String>, detail: impl Display) -> FieldError {
        FieldError { location, pointer: pointer.into(), detail: detail.to_string() }
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
    fn a_problem_has_its_type_status_and_field_errors() {
        let problem = Problem::validation(vec![FieldError::body("/name", "must not be empty")]);
        let body = json(&problem);
        assert_eq!(body["type"], "urn:pillarbox:problem:validation-failed");
        assert_eq!(body["status"], 422);
        assert_eq!(body["detail"], "name: must not be empty");
        assert_eq!(body["errors"][0]["in"], "body");
        assert_eq!(body["errors"][0]["pointer"], "/name");
    }

    #[test]
    fn an_internal_problem_does_not_contain_its_cause() {
        let body = json(&Problem::internal(&"password=hunter2"));
        assert!(!body.to_string().contains("hunter2"));
    }

    #[test]
    fn a_full_queue_is_an_overload_and_a_bug_is_internal() {
        let status = |error: SubmitError<()>| Problem::of_batch(error, |()| unreachable!()).status().as_u16();
        assert_eq!(status(SubmitError::Overloaded), 503);
        assert_eq!(status(SubmitError::Broken("on purpose".into())), 500);
    }

    #[test]
    fn retry_after_is_a_positive_number_of_seconds() {
        let response = Problem::overloaded("full", Duration::from_millis(20)).into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }
}
