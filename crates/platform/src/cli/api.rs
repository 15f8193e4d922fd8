//! Requests of commands to the HTTP API of a running server.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use chrono::Utc;
use clap::Args;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::rt::TokioExecutor;
use kit::auth::{Caller, PortalAccess, Principal, Role, TENANT_HEADER, Tenant, TokenSigner};
use kit::secret::Secret;
use serde_json::Value;
use sqlx::PgPool;
use uuid::Uuid;

use super::Failure;
use super::https::Connector;
use super::installation::{connect, master_keys};
use crate::data_dir::DataDir;
use crate::portal_tokens::{NewPortalToken, flow as portal_tokens};
use crate::settings::Settings;

/// Timeout of one request.
const TIME_MAX: Duration = Duration::from_secs(30);
/// The server closes a connection that is idle for 10 s; a request at that moment would be lost.
const IDLE_TIME_MAX: Duration = Duration::from_secs(5);
/// Timeout of a request that changes many rows.
const BULK_TIME_MAX: Duration = Duration::from_secs(600);
/// Largest response that is read.
const BYTES_MAX: usize = 16 << 20;
/// How long the credentials of one command are valid, if it ends without deleting them.
const TOKEN_SECONDS: i64 = 600;

/// Which server a command talks to, and with which key.
#[derive(Args, Clone)]
pub(super) struct ServerArgs {
    /// The address of the server [default: the server of the data folder, or the setting listen]
    #[arg(long, global = true, value_name = "URL")]
    pub(super) server: Option<String>,
    /// The API key [default: the setting admin_key, or access by the data folder]. Better as a variable: other users can see the
    /// arguments of a process
    #[arg(long, global = true, value_name = "KEY", env = "PILLARBOX_API_KEY", hide_env_values = true)]
    pub(super) api_key: Option<String>,
}

/// An HTTP client with credentials. Clones share their connections.
#[derive(Clone)]
pub(super) struct Api {
    http: HttpClient<Connector, Full<Bytes>>,
    base: String,
    bearer: Secret<String>,
    tenant: Option<Tenant>,
}

/// Why a request has no result.
#[derive(Debug)]
pub(super) enum ApiError {
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
    pub(super) fn new(base: &str, bearer: Secret<String>) -> Result<Api, Failure> {
        let connector = Connector::new().map_err(Failure::Other)?;
        let http = HttpClient::builder(TokioExecutor::new()).pool_idle_timeout(IDLE_TIME_MAX).build(connector);
        Ok(Api { http, base: base.trim_end_matches('/').to_owned(), bearer, tenant: None })
    }

    /// Acts for this tenant. The API key decides whether it may.
    pub(super) fn for_tenant(self, tenant: &Tenant) -> Api {
        let tenant = (*tenant != Tenant::main()).then(|| tenant.clone());
        Api { tenant, ..self }
    }

    /// The same server with other credentials.
    pub(super) fn with_bearer(&self, bearer: Secret<String>) -> Api {
        Api { bearer, tenant: None, ..self.clone() }
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value, ApiError> {
        self.send(Method::GET, path, None).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        self.send(Method::POST, path, Some(body)).await
    }

    /// Sends a request that may change many rows, and so may take long.
    pub(super) async fn post_bulk(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        let request = self.request(Method::POST, path, Some(body.to_string()), Some(&new_key()))?;
        Ok(serde_json::from_slice(&self.answer_to(request, BULK_TIME_MAX).await?).unwrap_or_default())
    }

    /// Sends a request. A mutation has its own `Idempotency-Key`, which some routes require. Returns the body of a successful
    /// response; null if it has none.
    pub(super) async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, ApiError> {
        let key = (!method.is_safe()).then(new_key);
        let answer = self.send_text(method, path, body.map(Value::to_string), key.as_deref()).await?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    }

    /// Sends a request with this body, byte for byte. Returns the body of a successful response. Without an idempotency key the
    /// server accepts every JSON; with one it compares the body with that of a repeat, and refuses numbers that it cannot.
    pub(super) async fn send_text(
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
            let answer = self.http.request(request).await.map_err(|error| cause_of(&error))?;
            let status = answer.status();
            let body =
                Limited::new(answer.into_body(), BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
            Ok::<_, String>((status, body.to_bytes()))
        });
        let answered = answer.await.map_err(|_| unreachable(format!("no response within {} s", time_max.as_secs())))?;
        let (status, body) = answered.map_err(unreachable)?;
        match status.is_success() {
            true => Ok(body),
            false => Err(ApiError::Refused(status, problem_text(&String::from_utf8_lossy(&body)))),
        }
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
pub(super) fn problem_text(response: &str) -> String {
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

/// Access to the hub as one tenant, for one command.
pub(super) struct HubSession {
    pub(super) api: Api,
    /// The portal token that was created for this command.
    token: Option<(PgPool, Tenant, Uuid)>,
}

impl HubSession {
    /// Uses the given API key, or the admin key of the settings. Without either, a user who has access to the installation's
    /// database gets a portal token, which [`HubSession::close`] deletes. Fails if there is no server or no such tenant.
    pub(super) async fn open(settings: &Settings, server: &ServerArgs, tenant: &Tenant) -> Result<HubSession, Failure> {
        let base = base_url(settings, server)?;
        check_credential_target(settings, server)?;
        if let Some(key) = server.api_key.clone().map(Secret::new).or_else(|| settings.admin_key.clone()) {
            return Ok(HubSession { api: Api::new(&base, key)?.for_tenant(tenant), token: None });
        }
        let db = connect(settings)?;
        let caller = Caller::new(Principal::Key(Uuid::nil()), tenant.clone(), Some(Role::Admin));
        let name = Some("command line".to_owned());
        let new = NewPortalToken { name, access: PortalAccess::Manage, expires_in_seconds: TOKEN_SECONDS };
        let created = portal_tokens::create(&mut *db.acquire().await?, &caller, new).await;
        let (token, secret) = created.map_err(|error| Failure::Other(error.to_string()))?;
        Ok(HubSession { api: Api::new(&base, secret)?, token: Some((db, tenant.clone(), token.id)) })
    }

    /// Deletes the credentials of this command. If that fails they expire.
    pub(super) async fn close(self) {
        if let Some((db, tenant, id)) = self.token
            && let Ok(mut db) = db.acquire().await
        {
            let _ = portal_tokens::revoke(&mut db, &tenant, id).await;
        }
    }
}

/// Access to the operator's API: with the given key, the admin key of the settings, or a token that the secret key of the data
/// folder signs.
pub(super) fn operator_api(settings: &Settings, server: &ServerArgs) -> Result<Api, Failure> {
    let base = base_url(settings, server)?;
    check_credential_target(settings, server)?;
    let key = server.api_key.clone().map(Secret::new).or_else(|| settings.admin_key.clone());
    let key = match key {
        Some(key) => key,
        None => sign_token(settings, Uuid::now_v7(), Some(Role::Admin), Duration::from_secs(TOKEN_SECONDS as u64))?,
    };
    Api::new(&base, key)
}

/// Access to the hub's API as a producer. Fails without an API key: a portal token posts no events.
pub(super) fn producer_api(settings: &Settings, server: &ServerArgs, tenant: &Tenant) -> Result<Api, Failure> {
    check_credential_target(settings, server)?;
    let key = server.api_key.clone().map(Secret::new).or_else(|| settings.admin_key.clone()).ok_or_else(|| {
        Failure::Other(
            "an API key is required: set PILLARBOX_API_KEY (create one with `pillarbox key create --role ingest`)"
                .to_owned(),
        )
    })?;
    Ok(Api::new(&base_url(settings, server)?, key)?.for_tenant(tenant))
}

/// Signs a user's token with the secret key of the installation. Fails if the data folder belongs to another one.
pub(super) fn sign_token(
    settings: &Settings,
    user: Uuid,
    role: Option<Role>,
    ttl: Duration,
) -> Result<Secret<String>, Failure> {
    let keys = master_keys(settings, &DataDir::at(&settings.data_dir)?)?;
    let key = keys.first().ok_or_else(|| Failure::Other("the installation has no secret key".to_owned()))?;
    let signer = match &settings.public_url {
        Some(address) => TokenSigner::new(key).with_issuer(address),
        None => TokenSigner::new(key),
    };
    let token = signer.sign(user, role, Utc::now(), ttl);
    token.map(Secret::new).map_err(|error| Failure::Other(format!("the token cannot be signed: {error}")))
}

/// Whether the host of a URL is a loopback address or `localhost`.
pub(super) fn is_on_this_machine(url: &str) -> bool {
    let uri: Option<Uri> = url.parse().ok();
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Fails if a credential of this installation would be sent to another machine, because `--server` names one without a key.
fn check_credential_target(settings: &Settings, server: &ServerArgs) -> Result<(), Failure> {
    let Some(url) = server.server.as_deref().filter(|_| server.api_key.is_none()) else { return Ok(()) };
    if is_on_this_machine(url) || url.trim_end_matches('/') == local_address(settings)? {
        return Ok(());
    }
    Err(Failure::Other(format!(
        "{url} is not the server of this installation, whose credentials are not sent elsewhere: set PILLARBOX_API_KEY to a key of \
         that server"
    )))
}

/// The address of the server: the given one, that of the server in the data folder, or the setting `listen`.
fn base_url(settings: &Settings, server: &ServerArgs) -> Result<String, Failure> {
    if let Some(url) = &server.server {
        return Ok(url.clone());
    }
    let holder = DataDir::at(&settings.data_dir)?.holder().filter(|_| settings.database_url.is_none());
    let address = holder.as_deref().and_then(|holder| holder.rsplit_once("http://")).map(|(_, address)| address);
    Ok(match address {
        Some(address) => format!("http://{address}"),
        None => format!("http://{}", settings.listen),
    })
}

impl ServerArgs {
    /// The server of this machine, without a given key.
    pub(super) fn local() -> ServerArgs {
        ServerArgs { server: None, api_key: None }
    }
}

pub(super) fn local_address(settings: &Settings) -> Result<String, Failure> {
    base_url(settings, &ServerArgs::local())
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
