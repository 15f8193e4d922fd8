//! An HTTP client that returns every response, whatever its status.

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// The server closes a connection that is idle for 10 s; a request at that moment would be lost.
const IDLE_TIME_MAX: Duration = Duration::from_secs(5);

/// Sends requests to one server with one set of credentials and headers.
#[derive(Clone)]
pub struct Client {
    http: HttpClient<HttpConnector, Full<Bytes>>,
    base: String,
    headers: HeaderMap,
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Client {
    /// A client without credentials.
    pub fn new(base: &str) -> Client {
        let http = HttpClient::builder(TokioExecutor::new()).pool_idle_timeout(IDLE_TIME_MAX).build_http();
        Client { http, base: base.to_owned(), headers: HeaderMap::new() }
    }

    /// The same client with this API key or token as its bearer credential.
    pub fn bearer(&self, credential: &str) -> Client {
        self.with_header("authorization", &format!("Bearer {credential}"))
    }

    pub fn with_header(&self, name: &str, value: &str) -> Client {
        let mut client = self.clone();
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
        client.headers.insert(name, HeaderValue::from_str(value).expect("a header value"));
        client
    }

    /// The address of the server: `http://127.0.0.1:PORT`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The bearer credential of this client. Panics if it has none.
    pub fn credential(&self) -> &str {
        let value = self.headers.get(AUTHORIZATION).expect("an authorization header").to_str().expect("text");
        value.trim_start_matches("Bearer ")
    }

    /// The bearer credential of this client, if it has one.
    pub fn credential_if_any(&self) -> Option<&str> {
        self.headers.contains_key(AUTHORIZATION).then(|| self.credential())
    }

    pub async fn get(&self, path: &str) -> Response {
        self.send(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Response {
        self.send(Method::POST, path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> Response {
        self.send(Method::DELETE, path, None).await
    }

    pub async fn send(&self, method: Method, path: &str, body: Option<Value>) -> Response {
        self.try_send(method, path, body).await.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Sends the body byte for byte, for JSON that `serde_json` would write differently.
    pub async fn send_text(&self, method: Method, path: &str, body: &str) -> Response {
        let sent = self.try_send_text(method, path, Some(body.to_owned())).await;
        sent.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Like [`send`](Self::send), for a server that may have ended: fails if there is no response.
    pub async fn try_send(&self, method: Method, path: &str, body: Option<Value>) -> Result<Response, String> {
        self.try_send_text(method, path, body.map(|body| body.to_string())).await
    }

    async fn try_send_text(&self, method: Method, path: &str, body: Option<String>) -> Result<Response, String> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        request.headers_mut().expect("a valid URL").extend(self.headers.clone());
        if body.is_some() && !self.headers.contains_key(CONTENT_TYPE) {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default()))).expect("a valid request");
        let (parts, body) = self.http.request(request).await.map_err(|error| error.to_string())?.into_parts();
        let body = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
        let text = String::from_utf8(body.to_vec()).expect("UTF-8");
        Ok(Response { status: parts.status.as_u16(), headers: parts.headers, text })
    }
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no header {name}: {self:?}"));
        value.to_str().expect("text")
    }

    /// Panics unless this is a problem document with this status and type.
    pub fn assert_problem(&self, status: u16, kind: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/problem+json", "{self:?}");
        let body = self.json();
        assert_eq!(body["type"], format!("urn:pillarbox:problem:{kind}"), "{self:?}");
        assert_eq!(body["status"], status, "{self:?}");
        assert!(body["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{self:?}");
    }
}
