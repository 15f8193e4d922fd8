//! Extractors for bodies, paths and queries. They reject with problems.
//!
//! They also reject text that the database cannot store: text that is not UTF-8, and NUL, which PostgreSQL's `text`
//! does not support.

use std::time::Duration;

use axum::RequestPartsExt;
use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::admission::body_budget::{BodyBudget, BodyReservation};
use crate::admission::caller_id::CallerId;
use crate::caller::Caller;
use crate::client_address::ClientAddress;
use crate::problem::{FieldError, FieldErrors, Location, Problem};
use runtime::json;
use runtime::parse_error::{self, ParseError};

/// The limits of every request.
#[derive(Debug, Clone, Copy)]
pub struct RequestLimits {
    pub body_bytes_max: usize,
    /// The bodies of all requests together; one caller may use half of it.
    pub body_bytes_total_max: usize,
    /// The responses that clients have yet to read, together; one caller may use half of it.
    pub response_bytes_total_max: usize,
    pub body_time_max: Duration,
    /// From the end of the request's head to the start of the response.
    pub request_time_max: Duration,
}

impl Default for RequestLimits {
    fn default() -> RequestLimits {
        RequestLimits {
            body_bytes_max: 1024 * 1024,
            body_bytes_total_max: 64 * 1024 * 1024,
            response_bytes_total_max: 64 * 1024 * 1024,
            body_time_max: Duration::from_secs(15),
            request_time_max: Duration::from_secs(30),
        }
    }
}

/// The limits and the budget of request bodies. A layer adds them to the request's extensions.
#[derive(Debug, Clone)]
pub(crate) struct BodyLimits {
    pub(crate) limits: RequestLimits,
    budget: BodyBudget,
}

impl BodyLimits {
    pub(crate) fn new(limits: RequestLimits) -> BodyLimits {
        BodyLimits { limits, budget: BodyBudget::new(limits.body_bytes_max, limits.body_bytes_total_max) }
    }
}

/// A JSON body, of a request or of a response.
#[derive(Debug, Clone, Copy)]
pub struct Json<T>(pub T);

/// The parameters of the route's path.
#[derive(Debug, Clone, Copy)]
pub struct Path<T>(pub T);

/// The query string.
#[derive(Debug, Clone, Copy)]
pub struct Query<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _state: &S) -> Result<Json<T>, Problem> {
        parse_json(&json_object(request).await?).map(Json)
    }
}

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static> FromRequestParts<S> for Path<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Path<T>, Problem> {
        let raw = parts.extract::<RawPathParams>().await;
        let raw = raw.map_err(|error| {
            // The rejection names the parameter in its text only: Invalid UTF-8 in `id`.
            let text = error.to_string();
            path_problem(text.split('`').nth(1).unwrap_or_default(), "must be UTF-8 when percent-decoded")
        })?;
        if let Some((name, _)) = raw.iter().find(|(_, value)| value.contains('\0')) {
            return Err(path_problem(name, "must not contain NUL"));
        }
        let path = parts.extract::<axum::extract::Path<T>>().await;
        path.map(|axum::extract::Path(value)| Path(value)).map_err(|rejection| {
            let (name, detail) = rejected_path(&rejection);
            match name {
                Some(name) => path_problem(name, detail),
                None => path_problem(&rejected_parameter::<T>(raw.iter()), detail),
            }
        })
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Query<T>, Problem> {
        parse_query(parts.uri.query().unwrap_or_default()).map(Query)
    }
}

pub(crate) fn parse_query<T: DeserializeOwned>(query: &str) -> Result<T, Problem> {
    parse_query_with(query, &[])
}

/// Parses a query. `others` are the parameters that the caller of this function reads itself; they are listed among the
/// accepted ones.
pub(crate) fn parse_query_with<T: DeserializeOwned>(query: &str, others: &[&str]) -> Result<T, Problem> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    if let Some((name, _)) = pairs.find(|(name, value)| name.contains('\0') || value.contains('\0')) {
        let pointer = format!("/{}", escape_pointer(&shortened(&name.replace('\0', ""))));
        return Err(query_problem(&pointer, "must not contain NUL"));
    }
    let fields = serde_urlencoded::Deserializer::new(form_urlencoded::parse(query.as_bytes()));
    serde_path_to_error::deserialize(fields).map_err(|error| {
        let (pointer, detail) = described(pointer(error.path()), &error.inner().to_string(), others);
        query_problem(&pointer, detail)
    })
}

/// Returns the 400 for a malformed query. `pointer` is the parameter (`/limit`), empty for the whole query.
pub fn query_problem(pointer: &str, detail: impl std::fmt::Display) -> Problem {
    let field = FieldError::at(Location::Query, pointer, detail);
    let summary =
        format!("{}{}{}", pointer.trim_start_matches('/'), if pointer.is_empty() { "" } else { ": " }, field.detail);
    Problem::bad_request("malformed-query", summary).with_errors(vec![field])
}

/// Returns the 400 for a malformed path. `name` is the parameter, empty for the whole path.
fn path_problem(name: &str, detail: impl std::fmt::Display) -> Problem {
    let pointer = if name.is_empty() { String::new() } else { format!("/{name}") };
    let summary = format!("{name}: {detail}");
    Problem::bad_request("malformed-path", summary.trim_start_matches(": ")).with_errors(vec![FieldError::at(
        Location::Path,
        pointer,
        detail,
    )])
}

/// Returns the name of the invalid parameter, if the rejection has it, and what the parameter accepts.
fn rejected_path(rejection: &axum::extract::rejection::PathRejection) -> (Option<&str>, String) {
    use axum::extract::path::ErrorKind;
    use axum::extract::rejection::PathRejection;
    let number = |expected: &str| format!("must be {}", parse_error::in_words(expected));
    let unusable = || (None, "is not a valid path of this route".to_owned());
    let PathRejection::FailedToDeserializePathParams(failed) = rejection else { return unusable() };
    match failed.kind() {
        ErrorKind::ParseErrorAtKey { key, expected_type, .. } => (Some(key), number(expected_type)),
        ErrorKind::ParseErrorAtIndex { expected_type, .. } | ErrorKind::ParseError { expected_type, .. } => {
            (None, number(expected_type))
        }
        ErrorKind::DeserializeError { key, message, .. } => (Some(key), parse_error::describe(message, &[]).detail),
        ErrorKind::Message(message) => (None, parse_error::describe(message, &[]).detail),
        ErrorKind::InvalidUtf8InPathParam { key } => (Some(key), "must be UTF-8 when percent-decoded".to_owned()),
        // The remaining kinds are errors of the program, and axum may add others.
        _ => unusable(),
    }
}

/// Returns the name of the parameter that `T` does not accept, for a rejection that names none: that of a route with one
/// parameter, or of a field whose type converts the text itself. Empty if it is not known.
fn rejected_parameter<'a, T: DeserializeOwned>(raw: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let parameters: Vec<(&str, &str)> = raw.collect();
    if let [(only, _)] = parameters[..] {
        return only.to_owned();
    }
    // The same fields as a query, of which it is known where a deserialization fails.
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(parameters).finish();
    let fields = serde_urlencoded::Deserializer::new(form_urlencoded::parse(query.as_bytes()));
    let failed = serde_path_to_error::deserialize::<_, T>(fields).err();
    failed.map(|error| pointer(error.path())).unwrap_or_default().trim_start_matches('/').to_owned()
}

fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    let mime = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = mime.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let detail = "send the body as JSON, with the header `content-type: application/json`";
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", detail))
}

/// Returns the announced length of the body, 0 if there is none. Fails with 413 if it is too large, before the body is
/// read.
fn announced_length(headers: &HeaderMap, bytes_max: usize) -> Result<usize, Problem> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match announced.map(usize::try_from) {
        None => Ok(0),
        Some(Ok(length)) if length <= bytes_max => Ok(length),
        Some(_) => Err(too_large(bytes_max)),
    }
}

/// Parses a JSON body as two types.
pub(crate) async fn read_twice<A, B>(request: Request) -> Result<(Json<A>, Json<B>), Problem>
where
    A: DeserializeOwned,
    B: DeserializeOwned,
{
    let body = json_object(request).await?;
    Ok((Json(parse_json(&body)?), Json(parse_json(&body)?)))
}

/// Reads a JSON body that may be absent. Returns None if it has no bytes, whatever its framing and its content type.
pub(crate) async fn optional_json(request: Request) -> Result<Option<Bytes>, Problem> {
    let is_json = require_json(request.headers());
    // A body of another type is refused before it is read, if it is known that there is one.
    if request.body().size_hint().lower() > 0 {
        is_json.clone()?;
    }
    let body = whole_body(request).await?;
    if body.is_empty() {
        return Ok(None);
    }
    is_json?;
    object(body).map(Some)
}

async fn json_object(request: Request) -> Result<Bytes, Problem> {
    require_json(request.headers())?;
    object(whole_body(request).await?)
}

/// Every body of the API is an object. Serde would deserialize a list into a struct, field by field.
fn object(body: Bytes) -> Result<Bytes, Problem> {
    match body.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'[') => Err(Problem::validation(vec![FieldError::body("", "must be a JSON object")])),
        _ => Ok(body),
    }
}

async fn whole_body(request: Request) -> Result<Bytes, Problem> {
    let body_limits = request.extensions().get::<BodyLimits>().cloned();
    let BodyLimits { limits, budget } = body_limits.unwrap_or_else(|| BodyLimits::new(RequestLimits::default()));
    let announced = announced_length(request.headers(), limits.body_bytes_max)?;
    let extensions = request.extensions();
    let caller = CallerId::of(extensions.get::<Caller>(), extensions.get::<ClientAddress>().copied());
    let mut reservation = budget.start(caller, announced)?;
    let body = read_body(request.into_body(), limits, &mut reservation).await?;
    reservation.release_after_response();
    Ok(body)
}

async fn read_body(body: Body, limits: RequestLimits, reservation: &mut BodyReservation) -> Result<Bytes, Problem> {
    let collecting = collect(body, limits.body_bytes_max, reservation);
    tokio::time::timeout(limits.body_time_max, collecting).await.unwrap_or_else(|_| {
        let detail = format!("the body did not arrive within {} s", limits.body_time_max.as_secs());
        Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "body-timeout", detail))
    })
}

/// Reads the body to its end. A body that arrives in one piece is not copied.
async fn collect(mut body: Body, bytes_max: usize, reservation: &mut BodyReservation) -> Result<Bytes, Problem> {
    let (mut first, mut joined) = (Bytes::new(), BytesMut::new());
    while let Some(frame) = body.frame().await {
        let broken = |_| Problem::bad_request("broken-body", "the body ended early, or its framing is invalid");
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if reservation.bytes() + data.len() > bytes_max {
            return Err(too_large(bytes_max));
        }
        reservation.grow(data.len())?;
        if first.is_empty() {
            first = data;
            continue;
        }
        if joined.is_empty() {
            joined.extend_from_slice(&first);
        }
        joined.extend_from_slice(&data);
    }
    Ok(if joined.is_empty() { first } else { joined.freeze() })
}

/// What to do with a body that is too large.
pub(crate) const SPLIT_BODY: &str =
    "split a list or an import into several requests, and store larger data elsewhere and send a reference to it";

fn too_large(bytes_max: usize) -> Problem {
    let detail = format!("a body is limited to {bytes_max} bytes: {SPLIT_BODY}");
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", detail)
}

pub(crate) fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let text = std::str::from_utf8(body)
        .map_err(|error| malformed_json(format!("it is not UTF-8 at byte {}", error.valid_up_to())))?;
    if escapes_nul(text) {
        return Err(malformed_json("strings must not contain NUL (\\u0000)"));
    }
    if json::is_too_deep(text) {
        return Err(too_deep(text));
    }
    // To follow the path to an error costs more than to parse, so it is followed only if there is an error.
    if let Ok(value) = serde_json::from_str(text) {
        return Ok(value);
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| json_problem(text, &error))?;
    json.end().map_err(|error| malformed_json(parse_error::describe_syntax(text, &error)))?;
    Ok(value)
}

fn too_deep(text: &str) -> Problem {
    let path = json::path_to_excess(text).unwrap_or_default();
    let pointer: String = path.iter().map(|part| format!("/{}", escape_pointer(&shortened(part)))).collect();
    let detail = format!("is nested too deeply: a body may have {} levels of arrays and objects", json::LEVELS_MAX);
    Problem::validation(vec![FieldError::body(pointer, detail)])
}

/// Parses a part of a body that is JSON. Fails with the pointer, relative to the part, of what is not accepted.
pub(crate) fn parse_part<T: DeserializeOwned>(text: &str) -> Result<T, FieldErrors> {
    if let Ok(value) = serde_json::from_str(text) {
        return Ok(value);
    }
    let json = &mut serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(json).map_err(|error| {
        let problem = json_problem(text, &error);
        problem.errors().iter().map(|field| (field.pointer.clone(), field.detail.clone())).collect()
    })
}

fn malformed_json(detail: impl std::fmt::Display) -> Problem {
    let field = FieldError::body("", format!("is not valid JSON: {detail}"));
    Problem::bad_request("malformed-json", format!("the body {}", field.detail)).with_errors(vec![field])
}

fn json_problem(text: &str, error: &serde_path_to_error::Error<serde_json::Error>) -> Problem {
    let inner = error.inner();
    if inner.is_data() {
        // serde_json appends line and column; the pointer is more precise.
        let detail = inner.to_string();
        let detail = detail.rsplit_once(" at line ").map_or(detail.as_str(), |(message, _)| message);
        let (pointer, detail) = described(pointer(error.path()), detail, &[]);
        return Problem::validation(vec![FieldError::body(pointer, detail)]);
    }
    // serde_json reports another type in place of a name as the syntax error that also stands for a missing value.
    let is_value_expected = inner.to_string().starts_with("expected value at ");
    if is_value_expected && serde_json::from_str::<IgnoredAny>(text).is_ok() {
        return Problem::validation(vec![FieldError::body(pointer(error.path()), "must be a string")]);
    }
    malformed_json(parse_error::describe_syntax(text, inner))
}

/// Returns the pointer of the invalid field and what it accepts. `pointer` is where serde stopped: the value itself, or
/// the object whose field is missing or unknown. `others` are accepted names that serde does not know.
fn described(pointer: String, message: &str, others: &[&str]) -> (String, String) {
    let ParseError { field, detail } = parse_error::describe(message, others);
    let field = field.map(|field| format!("/{}", escape_pointer(&shortened(&field))));
    match field {
        Some(field) if !pointer.ends_with(&field) => (pointer + &field, detail),
        _ => (pointer, detail),
    }
}

/// Returns true if the text contains the escape of NUL: `\u0000` after an even number of backslashes.
fn escapes_nul(text: &str) -> bool {
    text.match_indices("\\u0000").any(|(at, _)| {
        let before = text.as_bytes()[..at].iter().rev().take_while(|&&byte| byte == b'\\').count();
        before.is_multiple_of(2)
    })
}

fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    path.iter()
        .map(|segment| match segment {
            Segment::Seq { index } => format!("/{index}"),
            Segment::Map { key } => format!("/{}", escape_pointer(key)),
            Segment::Enum { variant } => format!("/{variant}"),
            Segment::Unknown => String::new(),
        })
        .collect()
}

/// Escapes a name for a JSON pointer.
pub fn escape_pointer(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Truncates a value of the caller, so that logs and responses stay short.
fn shortened(value: &str) -> String {
    const CHARS_MAX: usize = 64;
    match value.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &value[..at]),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests;
