//! The client: it connects to vetted addresses only, has one deadline for the whole
//! request, and reads little of the response.
//!
//! It follows no redirect, decompresses nothing, stores no cookies, and reads no proxy from the environment.
//!
//! The status decides. Once it has arrived, the request has a response whatever happens to the body: if the body is too
//! long, passes the deadline or breaks off, the connection is closed and the excerpt is what has arrived of the body.

mod access_token;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use std::{fmt, io};

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HOST, PROXY_AUTHORIZATION, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::timeout;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::CertificateDer;

use self::access_token::TokenCache;
pub use self::access_token::{AccessToken, ClientCredentials, InvalidCredentials, TokenSource};
use crate::address::{AddressPolicy, AllowedNetworks};
use crate::connection_pool::{ConnectionPool, HEAD_BYTES_MAX, HttpConnection, SendError};
use crate::dial::{self, Dialer, Proxy, Resolve, SystemResolver};
use crate::error::{ClientError, ErrorClass, RequestError};
use crate::permit::Permit;
use crate::stream::{NotSent, TooManyBytes};
use crate::target::Target;

/// How much of a response body is read so that the connection can be reused. A longer one costs the connection.
const BODY_BYTES_MAX: usize = 64 * 1024;
/// The size of the excerpt of a response body.
const EXCERPT_BYTES_MAX: usize = 1024;
/// How many headers hyper accepts in a response.
const HEADERS_MAX: usize = 100;
/// The longest `Retry-After` that is honoured.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60 * 60);
const AGENT: HeaderValue = HeaderValue::from_static(concat!("Pillarbox/", env!("CARGO_PKG_VERSION")));
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

/// Settings of the [`Client`].
#[derive(Debug, Clone, Default)]
pub struct ClientSettings {
    /// Networks that may be dialled although they are not public.
    pub allowed_networks: AllowedNetworks,
    /// Refuses plain http, also for targets that were parsed without this rule.
    pub https_only: bool,
    /// The ports that may be dialled. Empty: all.
    pub allowed_ports: Vec<u16>,
    /// A proxy resolves host names itself and must restrict what it connects to. IP addresses in URLs, and names that
    /// this machine can resolve, are vetted here as well.
    pub proxy: Option<Proxy>,
    /// Root certificates that are trusted besides Mozilla's, for receivers with certificates of a private authority.
    pub extra_roots: Vec<CertificateDer<'static>>,
    /// What precedes the names of these settings in error texts, such as `hub.` for `hub.allowed_networks`.
    pub setting_prefix: &'static str,
}

/// A POST request to an endpoint.
#[derive(Debug)]
pub struct WebhookRequest<'a> {
    /// Where the request is sent.
    pub target: &'a Target,
    /// The client adds `host`, `accept-encoding` and, if it is absent, `user-agent`.
    pub headers: HeaderMap,
    /// The body, which is sent as it is.
    pub body: Bytes,
    /// The time from resolving the host name to the last byte of the response.
    pub timeout: Duration,
}

/// A response, with any status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookResponse {
    /// The status.
    pub status: StatusCode,
    /// The beginning of the body: at most 1 KiB of text on one line, without control characters. Empty if the body is
    /// compressed.
    pub excerpt: String,
    /// How long the receiver asks the sender to wait (`Retry-After`), at most one hour.
    pub retry_after: Option<Duration>,
}

/// The HTTP client. Cheap to clone: clones share the connection pool.
#[derive(Clone)]
pub struct Client {
    dialer: Arc<Dialer>,
    pool: Arc<ConnectionPool>,
    tokens: Arc<TokenCache>,
    policy: Arc<AddressPolicy>,
    allowed_ports: Arc<[u16]>,
    https_only: bool,
    proxy: Option<Proxy>,
}

impl Client {
    /// Creates a client that resolves names as this machine does.
    ///
    /// # Errors
    /// A setting is invalid, or this machine lacks what the client needs.
    pub fn new(settings: ClientSettings) -> Result<Client, ClientError> {
        Client::with_resolver(settings, Arc::new(SystemResolver::new()?))
    }

    /// Creates a client with its own name resolution, for tests and for names that are not in DNS.
    ///
    /// # Errors
    /// A setting is invalid, or this machine lacks what the client needs.
    pub fn with_resolver(settings: ClientSettings, resolver: Arc<dyn Resolve>) -> Result<Client, ClientError> {
        let ClientSettings { allowed_networks, https_only, allowed_ports, proxy, extra_roots, setting_prefix } =
            settings;
        let policy = Arc::new(AddressPolicy { allowed: allowed_networks, setting_prefix });
        let dialer = Dialer::new(Arc::clone(&policy), resolver, proxy.as_ref(), &extra_roots)?;
        let (dialer, allowed_ports) = (Arc::new(dialer), allowed_ports.into());
        let (pool, tokens) = (Arc::default(), Arc::default());
        Ok(Client { dialer, pool, tokens, policy, allowed_ports, https_only, proxy })
    }

    /// Checks what can be checked without DNS: the scheme, the port, and an IP address in the URL. It can be called when an
    /// endpoint is registered, so that its owner sees the error at once.
    ///
    /// # Errors
    /// Describes why the target is refused.
    pub fn vet_target(&self, target: &Target) -> Result<(), RequestError> {
        if self.https_only && !target.is_https() {
            return Err(RequestError::new(
                ErrorClass::AddressRefused,
                "the URL must be https: this installation permits no plain http",
            ));
        }
        if !self.allowed_ports.is_empty() && !self.allowed_ports.contains(&target.port()) {
            let ports = self.allowed_ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
            let (port, prefix) = (target.port(), self.policy.setting_prefix);
            let text = format!("port {port} is not permitted: `{prefix}allowed_ports` permits {ports}");
            return Err(RequestError::new(ErrorClass::AddressRefused, text));
        }
        target.ip_address().map_or(Ok(()), |address| self.policy.vet_ip_address(address))
    }

    /// Sends the request once and returns the response, with any status.
    ///
    /// # Errors
    /// No status arrived within the request's timeout.
    pub async fn post(&self, request: WebhookRequest<'_>) -> Result<WebhookResponse, RequestError> {
        match self.post_if(request, None).await? {
            Some(response) => Ok(response),
            None => Err(RequestError::new(ErrorClass::Protocol, "the request was not sent")),
        }
    }

    /// Like [`Client::post`], but sends nothing and returns None if the permit has ended when the connection is open and the
    /// first bytes of the request are about to be written.
    ///
    /// # Errors
    /// No status arrived within the request's timeout.
    pub async fn post_if(
        &self,
        request: WebhookRequest<'_>,
        permit: Option<Arc<dyn Permit>>,
    ) -> Result<Option<WebhookResponse>, RequestError> {
        let received = self.send(request, permit, EXCERPT_BYTES_MAX).await?;
        Ok(received.map(PartialResponse::into_response))
    }

    /// Sends the request once and returns the status and the whole body of the response.
    ///
    /// # Errors
    /// No status arrived within the request's timeout, or the body did not, is compressed or is longer than 64 KiB.
    pub async fn fetch(&self, request: WebhookRequest<'_>) -> Result<(StatusCode, Vec<u8>), RequestError> {
        match self.send(request, None, BODY_BYTES_MAX).await? {
            Some(received) if received.is_complete && received.is_plain => Ok((received.status, received.body_start)),
            Some(_) | None => Err(RequestError::new(ErrorClass::Protocol, "the body of the response cannot be read")),
        }
    }

    /// Returns an access token of this source, requested if there is none that is valid for a while. `refused` is a token that
    /// the endpoint did not accept: it is not used again.
    ///
    /// # Errors
    /// The token endpoint has not given a token until `end`.
    pub async fn access_token(
        &self,
        source: &TokenSource,
        refused: Option<&HeaderValue>,
        end: Instant,
    ) -> Result<AccessToken, RequestError> {
        self.tokens.token(self, source, refused, end).await
    }

    /// Sends the request once. Of the body, at most `body_max` bytes are returned.
    async fn send(
        &self,
        request: WebhookRequest<'_>,
        permit: Option<Arc<dyn Permit>>,
        body_max: usize,
    ) -> Result<Option<PartialResponse>, RequestError> {
        // A pooled connection skips the dialer, which checked its address only when it was opened.
        self.vet_target(request.target)?;
        let time_max = request.timeout;
        let mut received = None;
        let exchanged = timeout(time_max, self.exchange(request, permit, body_max, &mut received)).await;
        match (received, exchanged) {
            (Some(received), _) => Ok(Some(received)),
            (None, Ok(Err(failure))) => Err(failure),
            (None, Ok(Ok(()))) => Ok(None),
            (None, Err(_)) => Err(RequestError::new(ErrorClass::Timeout, format!("no response within {time_max:?}"))),
        }
    }

    /// Writes into `received` as the response arrives, so that the status survives when the deadline cancels this
    /// future. Nothing is written if the request may not be sent.
    async fn exchange(
        &self,
        request: WebhookRequest<'_>,
        permit: Option<Arc<dyn Permit>>,
        body_max: usize,
        received: &mut Option<PartialResponse>,
    ) -> Result<(), RequestError> {
        let target = request.target;
        let request = self.http_request(request);
        let (mut connection, response) = loop {
            let mut connection = match self.pool.checkout(target.connection_key()) {
                Some(connection) => connection,
                // Boxed, because it is rare and large: every request would copy the space for it.
                None => Box::pin(self.connect(target)).await?,
            };
            match connection.send(request.clone(), permit.clone()).await {
                Ok(response) => break (connection, response),
                Err(SendError::NotSent(NotSent::PermitEnded)) => return Ok(()),
                Err(SendError::NotSent(NotSent::ConnectionUnusable)) => {} // the next one; a new one is never unusable
                // Never sent twice: the receiver may have processed a request that is lost with its connection.
                Err(SendError::Failed(error)) => return Err(failure_of(&error)),
            }
        };
        let (parts, body) = response.into_parts();
        let received = received.insert(PartialResponse {
            status: parts.status,
            retry_after: retry_after(&parts.headers, SystemTime::now),
            is_plain: !parts.headers.contains_key(CONTENT_ENCODING),
            body_start: Vec::new(),
            body_max,
            is_complete: false,
        });
        if received.read_body(&mut connection, body).await {
            self.pool.check_in(target.connection_key(), connection);
        }
        Ok(())
    }

    async fn connect(&self, target: &Target) -> Result<HttpConnection, RequestError> {
        let stream = self.dialer.dial(target.uri(), target.identity()).await?;
        HttpConnection::new(stream).await.map_err(|error| failure_of(&error))
    }

    fn http_request(&self, request: WebhookRequest<'_>) -> Request<Full<Bytes>> {
        let WebhookRequest { target, headers, body, .. } = request;
        // Plain http goes to the proxy, which needs the absolute URL. https goes through a tunnel to the receiver
        // itself.
        let http_proxy = self.proxy.as_ref().filter(|_| !target.is_https());
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = if http_proxy.is_some() { target.uri() } else { target.path() }.clone();
        *request.headers_mut() = headers;
        let headers = request.headers_mut();
        headers.insert(HOST, target.host().clone());
        headers.insert(ACCEPT_ENCODING, IDENTITY);
        headers.entry(USER_AGENT).or_insert(AGENT);
        if let Some(auth) = http_proxy.and_then(|proxy| proxy.auth.clone()) {
            headers.insert(PROXY_AUTHORIZATION, auth);
        }
        request
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// A response whose body may still arrive.
struct PartialResponse {
    status: StatusCode,
    retry_after: Option<Duration>,
    /// Whether the body is not compressed.
    is_plain: bool,
    /// The first bytes of the body, at most `body_max`.
    body_start: Vec<u8>,
    body_max: usize,
    /// The body has arrived to its end, and is not longer than [`BODY_BYTES_MAX`].
    is_complete: bool,
}

impl PartialResponse {
    /// Reads the body to its end and returns true, so that the connection can be reused. Returns false if the body
    /// breaks off or is longer than [`BODY_BYTES_MAX`].
    async fn read_body(&mut self, connection: &mut HttpConnection, mut body: Incoming) -> bool {
        let mut length = 0;
        while let Some(frame) = connection.frame(&mut body).await {
            let Ok(frame) = frame else { return false };
            let Some(data) = frame.data_ref() else { continue };
            length += data.len();
            if self.is_plain {
                let missing = self.body_max - self.body_start.len();
                self.body_start.extend_from_slice(&data[..data.len().min(missing)]);
            }
            if length > BODY_BYTES_MAX {
                return false;
            }
        }
        self.is_complete = true;
        true
    }

    fn into_response(self) -> WebhookResponse {
        WebhookResponse { status: self.status, excerpt: excerpt(&self.body_start), retry_after: self.retry_after }
    }
}

/// One line of valid UTF-8 without control characters.
fn excerpt(body_start: &[u8]) -> String {
    let mut text = String::new();
    let cleaned = String::from_utf8_lossy(body_start);
    let cleaned = cleaned.chars().map(|c| if c.is_ascii_whitespace() { ' ' } else { c }).filter(|c| !c.is_control());
    for c in cleaned {
        // The replacement character has three bytes where an invalid byte was one.
        if text.len() + c.len_utf8() > EXCERPT_BYTES_MAX {
            break;
        }
        text.push(c);
    }
    text
}

/// Reads `Retry-After` as seconds or as a date. Returns None if it is absent or neither of them.
fn retry_after(headers: &HeaderMap, now: impl FnOnce() -> SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    let wait = if is_number {
        value.parse().map_or(RETRY_AFTER_MAX, Duration::from_secs) // too many digits for a number: a long time
    } else {
        httpdate::parse_http_date(value).ok()?.duration_since(now()).unwrap_or_default()
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

/// Classifies the failure of an open connection.
fn failure_of(error: &hyper::Error) -> RequestError {
    // The innermost cause is the most specific.
    let classified = dial::causes(error).filter_map(|cause| Some((class_of(cause)?, cause))).last();
    let (class, cause) = classified.unwrap_or((ErrorClass::Protocol, error));
    RequestError::new(class, describe(class, cause))
}

fn class_of(cause: &(dyn Error + 'static)) -> Option<ErrorClass> {
    if let Some(error) = cause.downcast_ref::<hyper::Error>() {
        let has_ended = error.is_incomplete_message() || error.is_canceled() || error.is_closed();
        return Some(if has_ended { ErrorClass::Reset } else { ErrorClass::Protocol });
    }
    let error = cause.downcast_ref::<io::Error>()?;
    Some(match error.get_ref() {
        Some(inner) if inner.is::<TooManyBytes>() => ErrorClass::Protocol,
        // A receiver that requires a client certificate reports it only after the handshake.
        Some(inner) if inner.is::<rustls::Error>() => ErrorClass::Tls,
        Some(_) | None => ErrorClass::Reset,
    })
}

/// Whether the receiver has sent too much before the end of the response's headers.
fn is_head_too_large(cause: &(dyn Error + 'static)) -> bool {
    let has_too_many = |error: &io::Error| error.get_ref().is_some_and(|inner| inner.is::<TooManyBytes>());
    cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse_too_large)
        || cause.downcast_ref::<io::Error>().is_some_and(has_too_many)
}

fn describe(class: ErrorClass, cause: &(dyn Error + 'static)) -> String {
    match class {
        ErrorClass::Protocol if is_head_too_large(cause) => format!(
            "the response's headers are too large: at most {} KiB, together with those of interim (1xx) responses, and \
             {HEADERS_MAX} headers",
            HEAD_BYTES_MAX / 1024
        ),
        ErrorClass::Reset => format!("the connection ended before a response arrived: {cause}"),
        ErrorClass::Protocol => format!("the response is not valid HTTP/1: {cause}"),
        ErrorClass::Dns
        | ErrorClass::AddressRefused
        | ErrorClass::Oauth2
        | ErrorClass::Connect
        | ErrorClass::Proxy
        | ErrorClass::Tls
        | ErrorClass::Timeout => cause.to_string(),
    }
}

#[cfg(test)]
mod tests;
