//! `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header-07): reading it, and telling one request from another.
//! What was answered is kept elsewhere: nothing here knows a table.

use axum::RequestExt;
use axum::extract::{FromRequest, Request};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::auth::Caller;
use crate::extract::{Json, single_header};
use crate::problem::{CONTENT_TYPE, FieldError, Place, Problem};

const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
/// Its older name, which many clients still send.
const OLD_HEADER: HeaderName = HeaderName::from_static("x-idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
const KEY_CHARS_MAX: usize = 255;

/// A request, told from every other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Of the caller and the key.
    pub id: [u8; 16],
    /// Of the method, the address, what version it is for, and the body's meaning.
    pub fingerprint: [u8; 16],
}

/// A mutation: its body, and who it is if the caller gave it a key. `T = ()` for one without a body.
#[derive(Debug)]
pub struct Mutation<T> {
    pub body: T,
    pub identity: Option<Identity>,
}

impl<T> Mutation<T> {
    /// For routes that must have a key.
    pub fn require_identity(&self) -> Result<&Identity, Problem> {
        self.identity.as_ref().ok_or_else(|| refused("is required here: send a new value with each new request"))
    }
}

/// What a mutation answers, in a form that can be kept and given again: a status, and JSON or nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    status: StatusCode,
    body: Vec<u8>,
    /// Not kept: a repeat is answered without them.
    headers: HeaderMap,
    replayed: bool,
}

impl Answer {
    pub fn json(status: StatusCode, body: &impl Serialize) -> Answer {
        // Our views are structs of plain values, which always serialise.
        Answer { body: serde_json::to_vec(body).unwrap_or_default(), ..Answer::empty(status) }
    }

    pub fn empty(status: StatusCode) -> Answer {
        Answer { status, body: Vec::new(), headers: HeaderMap::new(), replayed: false }
    }

    pub fn refusal(problem: &Problem) -> Answer {
        Answer { body: problem.to_json(), ..Answer::empty(problem.status()) }
    }

    /// One that was given before.
    pub fn again(status: StatusCode, body: Vec<u8>) -> Answer {
        Answer { body, replayed: true, ..Answer::empty(status) }
    }

    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Answer {
        self.headers.insert(name, value);
        self
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
}

impl IntoResponse for Answer {
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

/// What a body can be read as.
pub trait Body: Sized {
    /// With what it means, if that is asked for: it costs another look.
    fn read(request: Request, with_meaning: bool) -> impl Future<Output = Result<(Self, Value), Problem>> + Send;
}

impl Body for () {
    async fn read(_request: Request, _with_meaning: bool) -> Result<((), Value), Problem> {
        Ok(((), Value::Null))
    }
}

/// A JSON body; the type says which.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send> Body for JsonBody<T> {
    async fn read(request: Request, with_meaning: bool) -> Result<(JsonBody<T>, Value), Problem> {
        if !with_meaning {
            let Json(body) = Json::from_request(request, &()).await?;
            return Ok((JsonBody(body), Value::Null));
        }
        let (Json(value), Json(body)) = crate::extract::read_twice::<Value, T>(request).await?;
        Ok((JsonBody(body), value))
    }
}

impl<S: Send + Sync, T: Body + Send> FromRequest<S> for Mutation<T> {
    type Rejection = Problem;

    async fn from_request(mut request: Request, _state: &S) -> Result<Mutation<T>, Problem> {
        let key = idempotency_key(request.headers())?;
        let caller = request.extract_parts::<Option<Caller>>().await?;
        let (method, address) = (request.method().clone(), request.uri().to_string());
        let if_match = single_header(request.headers(), &header::IF_MATCH)?.map(str::to_owned);
        let (body, meaning) = T::read(request, key.is_some()).await?;
        let meaning = canonical(&meaning);
        let mut parts = vec![method.as_str(), &address, &meaning];
        parts.extend(if_match.as_deref());
        let identity = key.map(|key| Identity {
            id: short_digest(&[&scope(caller.as_ref()), &key]),
            fingerprint: short_digest(&parts),
        });
        Ok(Mutation { body, identity })
    }
}

fn scope(caller: Option<&Caller>) -> String {
    caller.map_or_else(|| "anyone".to_owned(), |caller| format!("{} {}", caller.tenant.as_str(), caller.principal))
}

/// A quoted string, as the draft says, or a bare token, as most clients send.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let text = match (single_header(headers, &HEADER)?, single_header(headers, &OLD_HEADER)?) {
        (None, None) => return Ok(None),
        (Some(text), None) | (None, Some(text)) => text,
        (Some(_), Some(_)) => return Err(refused("takes one value; X-Idempotency-Key is another name for it")),
    };
    let key = match text.strip_prefix('"') {
        Some(rest) => unquoted(rest).ok_or_else(|| refused("is not a well-formed quoted string"))?,
        None => text.to_owned(),
    };
    if key.is_empty() || key.len() > KEY_CHARS_MAX {
        return Err(refused(&format!("takes 1 to {KEY_CHARS_MAX} characters")));
    }
    Ok(Some(key))
}

/// The rest of a structured-field string behind its opening quote: `\"` and `\\` are its only escapes.
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

fn refused(detail: &str) -> Problem {
    Problem::bad_request("idempotency-key", format!("Idempotency-Key {detail}")).with_errors(vec![FieldError::at(
        Place::Header,
        "/idempotency-key",
        detail,
    )])
}

/// The same text for the same meaning, whatever the order of the fields.
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

/// Parts are told apart by their length, so that none can run into the next.
fn short_digest(parts: &[&str]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts {
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

    async fn identity(key: &str, path: &str, body: &str) -> Identity {
        mutation(key, path, body).await.unwrap().identity.unwrap()
    }

    #[tokio::test]
    async fn one_meaning_has_one_fingerprint() {
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

    #[tokio::test]
    async fn a_key_is_a_token_or_a_quoted_string() {
        assert_eq!(
            identity(r#""a\"b\\c""#, "/", r#"{"count":1}"#).await.id,
            identity(r#"a"b\c"#, "/", r#"{"count":1}"#).await.id
        );
        for bad in [r#"""#, r#""""#, r#""a"b"#, r#""a\n""#, &"k".repeat(256)] {
            let problem = mutation(bad, "/", r#"{"count":1}"#).await.unwrap_err();
            assert_eq!((problem.status().as_u16(), problem.code()), (400, "idempotency-key"), "{bad}");
        }
    }
}
