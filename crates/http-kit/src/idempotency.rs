//! `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header-07): parses the header and computes the identity of a
//! request. Storing the responses is the task of another crate: this module uses no database.

use axum::RequestExt;
use axum::extract::{FromRequest, Request};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::caller::Caller;
use crate::extract::{Json, optional_json, parse_json};
use crate::header::single_header;
use crate::problem::{CONTENT_TYPE, FieldError, Location, Problem};

const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
/// The older name of the header, which many clients still send.
const OLD_HEADER: HeaderName = HeaderName::from_static("x-idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The names of the header, for the OpenAPI document.
pub(crate) const HEADERS: [&str; 2] = ["idempotency-key", "x-idempotency-key"];
/// The longest accepted key, in characters.
const KEY_CHARS_MAX: usize = 255;
/// What [`idempotency_key`] accepts, as a regular expression: a token, or a quoted string.
pub(crate) const KEY_PATTERN: &str = r#"^([!#-~]([ -~]{0,253}[!-~])?|"([ !#-\[\]-~]|\\["\\]){1,255}")$"#;

/// Identifies a request, so that its repetition can be recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestIdentity {
    /// The digest of the caller and the key; without a caller, of the key and the request.
    pub id: [u8; 16],
    /// The digest of the method, the URI, the canonical body and `If-Match`. The same id with another fingerprint is
    /// a misuse of the key.
    pub fingerprint: [u8; 16],
}

/// The extractor of a request that changes something: its body, and its identity if the caller sent a key. `T = ()`
/// for a request without a body.
#[derive(Debug)]
pub struct Mutation<T> {
    pub body: T,
    pub identity: Option<RequestIdentity>,
}

impl<T> Mutation<T> {
    /// Returns the identity. Fails with 400 if the caller sent no key. For routes that require one.
    pub fn require_identity(&self) -> Result<&RequestIdentity, Problem> {
        self.identity.as_ref().ok_or_else(|| invalid_key("is required: send a new value with each new request"))
    }
}

/// The response to a mutation in a form that can be stored and repeated: a status with a JSON body or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredResponse {
    status: StatusCode,
    body: Vec<u8>,
    /// Not stored: a repeated response does not have them.
    headers: HeaderMap,
    replayed: bool,
    /// What a caller does next who repeats a request whose response is shown once.
    next_step: Option<String>,
}

impl StoredResponse {
    pub fn json(status: StatusCode, body: &impl Serialize) -> StoredResponse {
        // The views are structs of plain values, which always serialize.
        StoredResponse { body: serde_json::to_vec(body).unwrap_or_default(), ..StoredResponse::empty(status) }
    }

    pub fn empty(status: StatusCode) -> StoredResponse {
        StoredResponse { status, body: Vec::new(), headers: HeaderMap::new(), replayed: false, next_step: None }
    }

    /// Marks a response that contains a secret and is not stored. `next_step` names what was created, and tells a caller
    /// who has lost the response how to continue.
    pub fn shown_once(self, next_step: impl Into<String>) -> StoredResponse {
        StoredResponse { next_step: Some(next_step.into()), ..self }
    }

    pub fn problem(problem: &Problem) -> StoredResponse {
        StoredResponse { body: problem.to_json(), ..StoredResponse::empty(problem.status()) }
    }

    /// Returns a stored response for a repeated request. It carries the header `Idempotent-Replayed`.
    pub fn replay(status: StatusCode, body: Vec<u8>) -> StoredResponse {
        StoredResponse { body, replayed: true, ..StoredResponse::empty(status) }
    }

    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> StoredResponse {
        self.headers.insert(name, value);
        self
    }

    /// The same response with another status and body.
    pub fn with_body(self, status: StatusCode, body: &impl Serialize) -> StoredResponse {
        StoredResponse { status, body: serde_json::to_vec(body).unwrap_or_default(), ..self }
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn body(&self) -> &[u8] {
        &self.body
    }

    pub fn is_replayed(&self) -> bool {
        self.replayed
    }

    /// Returns the problem for a repeat of a request whose response contained a secret.
    pub fn already_answered(&self) -> Problem {
        let next_step = self.next_step.as_deref().unwrap_or("repeat the request with a new Idempotency-Key");
        let detail =
            format!("the first request succeeded, and the secret in its response is shown only once: {next_step}");
        Problem::conflict("already-answered", detail)
    }
}

impl IntoResponse for StoredResponse {
    fn into_response(self) -> Response {
        let content_type = if self.status.is_success() { "application/json" } else { CONTENT_TYPE };
        let is_empty = self.body.is_empty();
        let mut response = (self.status, self.body).into_response();
        let headers = response.headers_mut();
        headers.remove(header::CONTENT_TYPE);
        headers.extend(self.headers);
        if !is_empty {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        if self.replayed {
            headers.insert(REPLAYED, HeaderValue::from_static("true"));
        }
        response
    }
}

/// A body that [`Mutation`] can extract.
pub trait Body: Sized {
    /// Returns the body, and its JSON value if `with_value` is set: parsing twice costs more.
    fn read(request: Request, with_value: bool) -> impl Future<Output = Result<(Self, Value), Problem>> + Send;
}

impl Body for () {
    async fn read(_request: Request, _with_value: bool) -> Result<((), Value), Problem> {
        Ok(((), Value::Null))
    }
}

/// A JSON body of the type `T`.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send> Body for JsonBody<T> {
    async fn read(request: Request, with_value: bool) -> Result<(JsonBody<T>, Value), Problem> {
        if !with_value {
            let Json(body) = Json::from_request(request, &()).await?;
            return Ok((JsonBody(body), Value::Null));
        }
        let (Json(value), Json(body)) = crate::extract::read_twice::<Value, T>(request).await?;
        Ok((JsonBody(body), value))
    }
}

/// A JSON body of the type `T`. No body and null stand for the default of `T`.
#[derive(Debug)]
pub struct OptionalJsonBody<T>(pub T);

impl<T: DeserializeOwned + Default + Send> Body for OptionalJsonBody<T> {
    async fn read(request: Request, with_value: bool) -> Result<(OptionalJsonBody<T>, Value), Problem> {
        let Some(body) = optional_json(request).await? else {
            return Ok((OptionalJsonBody(T::default()), Value::Null));
        };
        let value = if with_value { parse_json(&body)? } else { Value::Null };
        Ok((OptionalJsonBody(parse_json::<Option<T>>(&body)?.unwrap_or_default()), value))
    }
}

impl<S: Send + Sync, T: Body + Send> FromRequest<S> for Mutation<T> {
    type Rejection = Problem;

    async fn from_request(mut request: Request, _state: &S) -> Result<Mutation<T>, Problem> {
        let key = idempotency_key(request.headers())?;
        let Some(key) = key else {
            let (body, _) = T::read(request, false).await?;
            return Ok(Mutation { body, identity: None });
        };
        let caller = request.extract_parts::<Option<Caller>>().await?;
        let (method, uri) = (request.method().clone(), request.uri().to_string());
        let if_match = single_header(request.headers(), &header::IF_MATCH)?.map(str::to_owned);
        let (body, value) = T::read(request, true).await?;
        let canonical_body = canonical(&value);
        let mut parts = vec![method.as_str(), &uri, &canonical_body];
        parts.extend(if_match.as_deref());
        let id = short_digest(&scoped(caller.as_ref(), &key, &parts));
        let identity = Some(RequestIdentity { id, fingerprint: short_digest(&parts) });
        Ok(Mutation { body, identity })
    }
}

/// Returns what identifies a request. Each caller has a separate space of keys. All others share one, so there the request is a
/// part of it: a client that sends another request with the same key neither gets the response of a stranger nor is refused.
fn scoped(caller: Option<&Caller>, key: &str, request: &[&str]) -> Vec<String> {
    let own = |caller: &Caller| vec![format!("{} {}", caller.tenant.as_str(), caller.principal), key.to_owned()];
    let shared = || ["anyone", key].iter().chain(request).map(|part| (*part).to_owned()).collect();
    caller.map_or_else(shared, own)
}

/// Accepts a quoted string, as in the draft, and a bare token, as most clients send.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let text = match (single_header(headers, &HEADER)?, single_header(headers, &OLD_HEADER)?) {
        (None, None) => return Ok(None),
        (Some(text), None) | (None, Some(text)) => text,
        (Some(_), Some(_)) => {
            return Err(invalid_key("must not be repeated; X-Idempotency-Key is another name for it"));
        }
    };
    let key = match text.strip_prefix('"') {
        Some(rest) => unquoted(rest)
            .ok_or_else(|| invalid_key("must be a well-formed quoted string if it begins with a quote"))?,
        None => text.to_owned(),
    };
    let is_printable = key.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    if key.is_empty() || key.len() > KEY_CHARS_MAX || !is_printable {
        return Err(invalid_key(&format!("must have 1 to {KEY_CHARS_MAX} printable characters of ASCII")));
    }
    Ok(Some(key))
}

/// Parses a structured-field string (RFC 9651) after its opening quote. Its only escapes are `\"` and `\\`.
fn unquoted(rest: &str) -> Option<String> {
    let mut text = String::new();
    let mut characters = rest.chars();
    loop {
        match characters.next()? {
            '"' => return characters.next().is_none().then_some(text),
            '\\' => match characters.next()? {
                escaped @ ('"' | '\\') => text.push(escaped),
                _ => return None,
            },
            character => text.push(character),
        }
    }
}

fn invalid_key(detail: &str) -> Problem {
    Problem::bad_request("idempotency-key", format!("Idempotency-Key {detail}")).with_errors(vec![FieldError::at(
        Location::Header,
        "/idempotency-key",
        detail,
    )])
}

/// Returns the JSON value as text with sorted fields, so that equal values have equal texts.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let mut names: Vec<&String> = fields.keys().collect();
            names.sort();
            let field = |name: &String| format!("{}:{}", Value::from(name.as_str()), canonical(&fields[name]));
            format!("{{{}}}", names.into_iter().map(field).collect::<Vec<_>>().join(","))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(canonical).collect::<Vec<_>>().join(",")),
        plain => plain.to_string(),
    }
}

/// Hashes each part with its length, so that the boundaries between parts are unambiguous.
fn short_digest<T: AsRef<str>>(parts: &[T]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts.iter().map(AsRef::as_ref) {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize()[..16]);
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body as HttpBody;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    struct Order {
        #[allow(dead_code)]
        count: u32,
    }

    async fn mutation(key: &str, path: &str, body: &str) -> Result<Mutation<JsonBody<Order>>, Problem> {
        let request = Request::builder()
            .method("POST")
            .uri(path)
            .header("content-type", "application/json")
            .header("idempotency-key", key)
            .body(HttpBody::from(body.to_owned()))
            .unwrap();
        Mutation::from_request(request, &()).await
    }

    #[tokio::test]
    async fn an_optional_body_may_be_absent_but_not_malformed() {
        #[derive(Debug, Default, PartialEq, Deserialize)]
        struct Reason {
            reason: Option<String>,
        }
        let read = async |body: HttpBody| {
            let request = Request::post("/").header("content-type", "application/json").body(body).unwrap();
            let read = Mutation::<OptionalJsonBody<Reason>>::from_request(request, &()).await;
            read.map(|mutation| mutation.body.0.reason).map_err(|problem| problem.status().as_u16())
        };
        assert_eq!(read(HttpBody::empty()).await, Ok(None));
        // The end of a chunked body is not known before it is read.
        let chunks = |chunks: &[&'static str]| {
            let chunks = chunks.iter().map(|chunk| Ok::<_, std::io::Error>(*chunk));
            HttpBody::from_stream(futures_util::stream::iter(chunks.collect::<Vec<_>>()))
        };
        assert_eq!(read(chunks(&[])).await, Ok(None));
        assert_eq!(read(chunks(&[""])).await, Ok(None));
        assert_eq!(read(chunks(&["{\"reason\":", "\"loud\"}"])).await, Ok(Some("loud".to_owned())));
        let untyped = Request::post("/").body(chunks(&[])).unwrap();
        assert!(Mutation::<OptionalJsonBody<Reason>>::from_request(untyped, &()).await.is_ok());
        let untyped = Request::post("/").body(chunks(&["{}"])).unwrap();
        let refused = Mutation::<OptionalJsonBody<Reason>>::from_request(untyped, &()).await.unwrap_err();
        assert_eq!(refused.status().as_u16(), 415);
        assert_eq!(read(HttpBody::from("{}")).await, Ok(None));
        assert_eq!(read(HttpBody::from("null")).await, Ok(None));
        assert_eq!(read(HttpBody::from(r#"{"reason":"loud"}"#)).await, Ok(Some("loud".to_owned())));
        assert_eq!(read(HttpBody::from("{")).await, Err(400));
        assert_eq!(read(HttpBody::from("[]")).await, Err(422));
    }

    async fn identity(key: &str, path: &str, body: &str) -> RequestIdentity {
        mutation(key, path, body).await.unwrap().identity.unwrap()
    }

    #[tokio::test]
    async fn equal_json_values_have_equal_fingerprints() {
        let first = identity("\"a\"", "/orders", r#"{"count":1,"x":[1,{"b":2,"a":1}]}"#).await;
        assert_eq!(first, identity("a", "/orders", "{ \"x\": [1, {\"a\": 1, \"b\": 2}], \"count\": 1 }").await);
        assert_ne!(
            first.fingerprint,
            identity("a", "/orders", r#"{"count":2,"x":[1,{"b":2,"a":1}]}"#).await.fingerprint
        );
        assert_ne!(
            first.fingerprint,
            identity("a", "/others", r#"{"count":1,"x":[1,{"b":2,"a":1}]}"#).await.fingerprint
        );
        assert_ne!(first.id, identity("b", "/orders", r#"{"count":1}"#).await.id);
    }

    #[test]
    fn a_caller_has_one_request_for_a_key_and_strangers_share_none() {
        let caller = |id| {
            let principal = crate::caller::Principal::User(uuid::Uuid::from_u128(id));
            Caller::new(principal, pillarbox::log::Tenant::main(), None)
        };
        let id = |caller: Option<Caller>, request: &[&str]| short_digest(&scoped(caller.as_ref(), "key", request));
        assert_eq!(id(Some(caller(1)), &["POST", "a"]), id(Some(caller(1)), &["POST", "b"]));
        assert_ne!(id(Some(caller(1)), &["POST", "a"]), id(Some(caller(2)), &["POST", "a"]));
        assert_ne!(id(None, &["POST", "a"]), id(None, &["POST", "b"]));
        assert_eq!(id(None, &["POST", "a"]), id(None, &["POST", "a"]));
        assert_ne!(id(None, &["POST", "a"]), id(Some(caller(1)), &["POST", "a"]));
    }

    #[tokio::test]
    async fn a_key_is_a_token_or_a_quoted_string() {
        assert_eq!(
            identity(r#""a\"b\\c""#, "/", r#"{"count":1}"#).await.id,
            identity(r#"a"b\c"#, "/", r#"{"count":1}"#).await.id
        );
        for bad in [r#"""#, r#""""#, r#""a"b"#, r#""a\n""#, "a\tb", &"k".repeat(256)] {
            let problem = mutation(bad, "/", r#"{"count":1}"#).await.unwrap_err();
            assert_eq!((problem.status().as_u16(), problem.code()), (400, "idempotency-key"), "{bad}");
        }
    }
}
