//! An HTTP client that says what came back, whatever it was.

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Calls one server, as one caller.
#[derive(Clone)]
pub struct Client {
    http: HttpClient<HttpConnector, Full<Bytes>>,
    base: String,
    headers: HeaderMap,
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Client {
    /// Calls as nobody.
    pub fn new(base: &str) -> Client {
        let http = HttpClient::builder(TokioExecutor::new()).build_http();
        Client { http, base: base.to_owned(), headers: HeaderMap::new() }
    }

    /// The same server, called with this key or token.
    pub fn bearer(&self, credential: &str) -> Client {
        self.with_header("authorization", &format!("Bearer {credential}"))
    }

    pub fn with_header(&self, name: &str, value: &str) -> Client {
        let mut client = self.clone();
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
        client.headers.insert(name, HeaderValue::from_str(value).expect("a header value"));
        client
    }

    /// The credential that it calls with.
    pub fn credential(&self) -> &str {
        let value = self.headers.get(AUTHORIZATION).expect("a caller").to_str().expect("text");
        value.trim_start_matches("Bearer ")
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(Method::POST, path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(Method::DELETE, path, None).await
    }

    pub async fn send(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        self.try_send(method, path, body).await.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// A body as it stands: JSON of one's own spelling.
    pub async fn send_text(&self, method: Method, path: &str, body: &str) -> Answer {
        let sent = self.try_send_text(method, path, Some(body.to_owned())).await;
        sent.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// For a server that may be gone.
    pub async fn try_send(&self, method: Method, path: &str, body: Option<Value>) -> Result<Answer, String> {
        self.try_send_text(method, path, body.map(|body| body.to_string())).await
    }

    async fn try_send_text(&self, method: Method, path: &str, body: Option<String>) -> Result<Answer, String> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        request.headers_mut().expect("the address is good").extend(self.headers.clone());
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default()))).expect("the request is good");
        let (parts, body) = self.http.request(request).await.map_err(|error| error.to_string())?.into_parts();
        let body = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
        let text = String::from_utf8(body.to_vec()).expect("UTF-8");
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, text })
    }
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no header {name}: {self:?}"));
        value.to_str().expect("text")
    }

    /// Fails the test unless this is a problem with this status and kind.
    pub fn assert_problem(&self, status: u16, kind: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/problem+json", "{self:?}");
        let body = self.json();
        assert_eq!(body["type"], format!("urn:pillarbox:problem:{kind}"), "{self:?}");
        assert_eq!(body["status"], status, "{self:?}");
        assert!(body["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{self:?}");
    }
}
