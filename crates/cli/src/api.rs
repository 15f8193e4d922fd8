//! Requests of commands to the HTTP API of a running server.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use http_kit::auth::TENANT_HEADER;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::rt::TokioExecutor;
use pillarbox::log::Tenant;
use runtime::secret::Secret;
use serde_json::Value;
use uuid::Uuid;

use crate::Failure;
use crate::https::Connector;

/// Timeout of one request.
const TIME_MAX: Duration = Duration::from_secs(30);
/// The server closes a connection that is idle for 10 s; a request at that moment would be lost.
const IDLE_TIME_MAX: Duration = Duration::from_secs(5);
/// Timeout of a request that changes many rows.
const BULK_TIME_MAX: Duration = Duration::from_secs(600);
/// Largest response that is read.
const BYTES_MAX: usize = 16 << 20;

/// Which server a command talks to, and with which key.
#[derive(Args, Clone)]
pub struct ServerArgs {
    /// The address of the server [default: the server of the data folder, or the setting listen]
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,
    /// The API key [default: the setting admin_key, or access by the data folder]. Better as a variable: other users can see the
    /// arguments of a process
    #[arg(long, global = true, value_name = "KEY", env = "PILLARBOX_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}

/// An HTTP client with credentials. Clones share their connections.
#[derive(Clone)]
pub struct Api {
    http: HttpClient<Connector, Full<Bytes>>,
    base: String,
    bearer: Secret<String>,
    tenant: Option<Tenant>,
}

/// Why a request has no result.
#[derive(Debug)]
pub enum ApiError {
    /// The request cannot be sent.
    Invalid(String),
    /// There is no response.
    Unreachable(String),
    /// The server has answered with this status and this problem.
    Refused(StatusCode, String),
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ApiError::Invalid(reason) | ApiError::Unreachable(reason) => f.write_str(reason),
            ApiError::Refused(status, detail) => write!(f, "the server answered {}: {detail}", status.as_u16()),
        }
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        Failure::Other(error.to_string())
    }
}

impl Api {
    /// Fails if the certificates of `SSL_CERT_FILE` cannot be read.
    pub fn new(base: &str, bearer: Secret<String>) -> Result<Api, Failure> {
        let connector = Connector::new()?;
        let http = HttpClient::builder(TokioExecutor::new()).pool_idle_timeout(IDLE_TIME_MAX).build(connector);
        Ok(Api { http, base: base.trim_end_matches('/').to_owned(), bearer, tenant: None })
    }

    /// The address of the server.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Acts for this tenant. The API key decides whether it may.
    pub fn for_tenant(self, tenant: &Tenant) -> Api {
        let tenant = (*tenant != Tenant::main()).then(|| tenant.clone());
        Api { tenant, ..self }
    }

    /// The same server with other credentials.
    pub fn with_bearer(&self, bearer: Secret<String>) -> Api {
        Api { bearer, tenant: None, ..self.clone() }
    }

    pub async fn get(&self, path: &str) -> Result<Value, ApiError> {
        self.send(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        self.send(Method::POST, path, Some(body)).await
    }

    /// Sends a request that may change many rows, and so may take long.
    pub async fn post_bulk(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        let request = self.request(Method::POST, path, Some(body.to_string()), Some(&new_key()))?;
        Ok(serde_json::from_slice(&self.answer_to(request, BULK_TIME_MAX).await?).unwrap_or_default())
    }

    /// Sends a request with this body, byte for byte, that may take long.
    pub async fn put_text(&self, path: &str, body: String) -> Result<Value, ApiError> {
        let request = self.request(Method::PUT, path, Some(body), None)?;
        Ok(serde_json::from_slice(&self.answer_to(request, BULK_TIME_MAX).await?).unwrap_or_default())
    }

    /// Returns the body of a response, byte for byte.
    pub async fn get_text(&self, path: &str) -> Result<String, ApiError> {
        Ok(String::from_utf8_lossy(&self.send_text(Method::GET, path, None, None).await?).into_owned())
    }

    /// Sends a request. A mutation has its own `Idempotency-Key`, which some routes require. Returns the body of a successful
    /// response; null if it has none.
    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, ApiError> {
        let key = (!method.is_safe()).then(new_key);
        let answer = self.send_text(method, path, body.map(Value::to_string), key.as_deref()).await?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    }

    /// Sends a request with this body, byte for byte. Returns the body of a successful response. Without an idempotency key the
    /// server accepts every JSON; with one it compares the body with that of a repeat, and refuses numbers that it cannot.
    pub async fn send_text(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        idempotency_key: Option<&str>,
    ) -> Result<Bytes, ApiError> {
        let request = self.request(method, path, body, idempotency_key)?;
        self.answer_to(request, TIME_MAX).await
    }

    async fn answer_to(&self, request: Request<Full<Bytes>>, time_max: Duration) -> Result<Bytes, ApiError> {
        let unreachable = |reason: String| {
            ApiError::Unreachable(format!(
                "{}: {reason}. Is it running? Start it with `pillarbox up`, or give another address with --server URL",
                self.base
            ))
        };
        let answer = tokio::time::timeout(time_max, async {
            let answer = self.http.request(request).await.map_err(|error| unreachable(cause_of(&error)))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), BYTES_MAX).collect().await;
            Ok::<_, ApiError>((status, body.map_err(|error| unreachable(error.to_string()))?.to_bytes()))
        });
        let (status, body) =
            answer.await.map_err(|_| unreachable(format!("no response within {} s", time_max.as_secs())))??;
        if status.is_success() {
            return Ok(body);
        }
        Err(ApiError::Refused(status, problem_text(&String::from_utf8_lossy(&body))))
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        idempotency_key: Option<&str>,
    ) -> Result<Request<Full<Bytes>>, ApiError> {
        let invalid = |text: String| ApiError::Invalid(text);
        let uri: Option<Uri> = format!("{}{path}", self.base).parse().ok();
        let has_scheme = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https"));
        let uri = uri.filter(has_scheme).ok_or_else(|| {
            invalid(format!(
                "--server {} must be an address such as http://127.0.0.1:8080 or https://example.org",
                self.base
            ))
        })?;
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", self.bearer.reveal()))
            .map_err(|_| invalid("the API key must be printable ASCII characters".to_owned()))?;
        bearer.set_sensitive(true);
        let mut request = Request::builder().method(method).uri(uri).header(header::AUTHORIZATION, bearer);
        if let Some(tenant) = &self.tenant {
            request = request.header(TENANT_HEADER, tenant.as_str());
        }
        if let Some(key) = idempotency_key {
            let key = HeaderValue::from_str(key);
            let key = key.map_err(|_| invalid("--idempotency-key must be printable ASCII characters".to_owned()))?;
            request = request.header("idempotency-key", key);
        }
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        request.body(Full::new(Bytes::from(body.unwrap_or_default()))).map_err(|error| invalid(error.to_string()))
    }
}

/// An idempotency key for a request that is sent once.
fn new_key() -> String {
    Uuid::now_v7().to_string()
}

/// The detail of a problem document, with the errors of fields that it does not contain; any other response unchanged.
pub fn problem_text(response: &str) -> String {
    let problem: Value = serde_json::from_str(response).unwrap_or_default();
    let Some(detail) = problem["detail"].as_str() else { return response.to_owned() };
    let mut text = detail.to_owned();
    for error in problem["errors"].as_array().into_iter().flatten() {
        let (Some(pointer), Some(reason)) = (error["pointer"].as_str(), error["detail"].as_str()) else { continue };
        if !detail.contains(reason) {
            text += &format!("; {}: {reason}", pointer.trim_start_matches('/'));
        }
    }
    text
}

/// The innermost cause: the outer texts only say that connecting failed.
fn cause_of(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// Whether the host of a URL is a loopback address or `localhost`.
pub fn is_on_this_machine(url: &str) -> bool {
    let uri: Option<Uri> = url.parse().ok();
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_problem_is_printed_once() {
        let one = r#"{"detail": "url: must be https", "errors": [{"pointer": "/url", "detail": "must be https"}]}"#;
        assert_eq!(problem_text(one), "url: must be https");
        let two = r#"{"detail": "2 fields are not valid", "errors": [{"pointer": "/url", "detail": "must be https"},
            {"pointer": "/name", "detail": "must not be empty"}]}"#;
        assert_eq!(problem_text(two), "2 fields are not valid; url: must be https; name: must not be empty");
        assert_eq!(problem_text("not JSON"), "not JSON");
    }

    #[test]
    fn only_loopback_hosts_are_on_this_machine() {
        for url in ["http://127.0.0.1:8080", "http://localhost/hook", "https://localhost:1", "http://[::1]:9000/"] {
            assert!(is_on_this_machine(url), "{url}");
        }
        let others =
            ["http://127.example.org", "http://localhost.example.org", "http://10.0.0.1", "http://me@example.org", ""];
        for url in others {
            assert!(!is_on_this_machine(url), "{url}");
        }
    }
}
