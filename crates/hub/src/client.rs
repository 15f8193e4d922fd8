//! The client that delivers webhooks: to vetted addresses only, within one deadline, and reading little of the answer.
//!
//! Absences: it follows no redirect, decompresses nothing, keeps no cookies, and reads no proxy from the environment.
//!
//! What counts is the status. Once it is in, the delivery has an answer, whatever becomes of the body: one that is too
//! long, drips past the deadline or breaks off costs its connection, and what came of it is the excerpt.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HOST, PROXY_AUTHORIZATION, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::CertificateDer;

use crate::address::Allowed;
use crate::dial::{self, Dialer, SystemResolver};
use crate::target::Target;
use crate::wire::{Pool, Wire};

pub use crate::dial::{Proxy, Resolve};

const BODY_BYTES_MAX: usize = 64 * 1024;
const EXCERPT_BYTES_MAX: usize = 1024;
/// A receiver that asks to be left alone is, but not for longer.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60 * 60);
const AGENT: HeaderValue = HeaderValue::from_static(concat!("Pillarbox/", env!("CARGO_PKG_VERSION")));
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

#[derive(Debug, Clone, Default)]
pub struct ClientSettings {
    /// Networks that may be dialled although they are not public.
    pub allowed_networks: Allowed,
    /// Refuses plain http, also for subscribers that were made before this was set.
    pub https_only: bool,
    /// With a proxy, names are resolved by the proxy, which must guard what it dials; names that this machine can resolve,
    /// and addresses in URLs, are vetted here as well.
    pub proxy: Option<Proxy>,
    /// Trusted beside Mozilla's: for receivers with certificates of a private authority.
    pub extra_roots: Vec<CertificateDer<'static>>,
}

/// A request on its way to a subscriber.
#[derive(Debug)]
pub struct Outgoing<'a> {
    pub target: &'a Target,
    /// `host`, `accept-encoding` and (if it is not there) `user-agent` are added.
    pub headers: HeaderMap,
    pub body: Bytes,
    /// From the name's resolution to the last byte of the answer.
    pub timeout: Duration,
}

/// What became of a request: an answer with whatever status, or none.
pub type Delivery = Result<Answer, Failure>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: StatusCode,
    /// The body's beginning: at most 1 KiB of text on one line, without control characters. Empty if it is compressed.
    pub excerpt: String,
    /// How long the receiver asks us to wait: at most an hour.
    pub retry_after: Option<Duration>,
}

/// Why there is no answer. The text is meant for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    pub class: ErrorClass,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// The name has no address, or could not be resolved.
    Dns,
    /// Policy: an address is not public, or plain http where only https is taken. Nothing was sent.
    AddressRefused,
    /// No connection. Nothing was sent.
    Connect,
    /// The operator's proxy is away or does not let us through. Nothing was sent.
    Proxy,
    /// No secure connection: the certificate, most often. Nothing was sent.
    Tls,
    /// No status within the deadline.
    Timeout,
    /// The connection ended before the status came. The receiver may have got the request.
    Reset,
    /// What came is not HTTP, or its headers are too large.
    Protocol,
}

impl ErrorClass {
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorClass::Dns => "dns",
            ErrorClass::AddressRefused => "address_refused",
            ErrorClass::Connect => "connect",
            ErrorClass::Proxy => "proxy",
            ErrorClass::Tls => "tls",
            ErrorClass::Timeout => "timeout",
            ErrorClass::Reset => "reset",
            ErrorClass::Protocol => "protocol",
        }
    }
}

/// Cheap to clone; clones share the pool of connections.
#[derive(Clone)]
pub struct Client {
    dialer: Arc<Dialer>,
    pool: Arc<Pool>,
    allowed: Arc<Allowed>,
    https_only: bool,
    proxy: Option<Proxy>,
}

impl Client {
    /// # Errors
    /// A sentence that says what is wrong with the settings.
    pub fn new(settings: ClientSettings) -> Result<Client, String> {
        Client::with_resolver(settings, Arc::new(SystemResolver::new()?))
    }

    /// For tests, and for names that DNS does not know.
    pub fn with_resolver(settings: ClientSettings, resolver: Arc<dyn Resolve>) -> Result<Client, String> {
        let ClientSettings { allowed_networks, https_only, proxy, extra_roots } = settings;
        let allowed = Arc::new(allowed_networks);
        let dialer = Dialer::new(Arc::clone(&allowed), resolver, proxy.as_ref(), &extra_roots)?;
        Ok(Client { dialer: Arc::new(dialer), pool: Arc::default(), allowed, https_only, proxy })
    }

    /// Would this target be refused whatever DNS says? Asked early, so that who makes a subscriber hears of it.
    pub fn vet_target(&self, target: &Target) -> Result<(), Failure> {
        if self.https_only && !target.is_https() {
            return Err(Failure::new(ErrorClass::AddressRefused, "only https is taken here"));
        }
        target.literal().map_or(Ok(()), |address| dial::vet_literal(&self.allowed, address))
    }

    pub async fn post(&self, outgoing: Outgoing<'_>) -> Delivery {
        // A pooled connection was vetted when it was dialled.
        self.vet_target(outgoing.target)?;
        let time_max = outgoing.timeout;
        let mut arrived = None;
        let exchanged = timeout(time_max, self.exchange(outgoing, &mut arrived)).await;
        match (arrived, exchanged) {
            (Some(arrived), _) => Ok(arrived.into_answer()),
            (None, Ok(Err(failure))) => Err(failure),
            (None, Err(_) | Ok(Ok(()))) => {
                Err(Failure::new(ErrorClass::Timeout, format!("no answer within {time_max:?}")))
            }
        }
    }

    /// What arrives is put where it survives that the deadline ends this.
    async fn exchange(&self, outgoing: Outgoing<'_>, arrived: &mut Option<Arrived>) -> Result<(), Failure> {
        let target = outgoing.target;
        let mut wire = match self.pool.take(target.origin()) {
            Some(wire) => wire,
            None => Wire::over(self.dialer.dial(target.uri()).await?).await.map_err(|error| Failure::of(&error))?,
        };
        // Never sent twice: of a request that is lost with its connection the receiver may have seen something.
        let answer = wire.send(self.request(outgoing)).await.map_err(|error| Failure::of(&error))?;
        let (parts, body) = answer.into_parts();
        let arrived = arrived.insert(Arrived {
            status: parts.status,
            retry_after: retry_after(&parts.headers, SystemTime::now),
            is_plain: !parts.headers.contains_key(CONTENT_ENCODING),
            beginning: Vec::new(),
        });
        if arrived.read(&mut wire, body).await {
            self.pool.put(target.origin(), wire);
        }
        Ok(())
    }

    fn request(&self, outgoing: Outgoing<'_>) -> Request<Full<Bytes>> {
        let Outgoing { target, headers, body, .. } = outgoing;
        // A proxy wants to know where to; in a tunnel it is not spoken to.
        let spoken_to = self.proxy.as_ref().filter(|_| !target.is_https());
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = if spoken_to.is_some() { target.uri() } else { target.path() }.clone();
        *request.headers_mut() = headers;
        let headers = request.headers_mut();
        headers.insert(HOST, target.host().clone());
        headers.insert(ACCEPT_ENCODING, IDENTITY);
        headers.entry(USER_AGENT).or_insert(AGENT);
        if let Some(auth) = spoken_to.and_then(|proxy| proxy.auth.clone()) {
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

/// An answer of which the body is still to come.
struct Arrived {
    status: StatusCode,
    retry_after: Option<Duration>,
    is_plain: bool,
    beginning: Vec<u8>,
}

impl Arrived {
    /// Reads to the end, so that the connection can be used again, unless the end is far: false then.
    async fn read(&mut self, wire: &mut Wire, mut body: Incoming) -> bool {
        let mut length = 0;
        while let Some(frame) = wire.frame(&mut body).await {
            let Ok(frame) = frame else { return false };
            let Some(data) = frame.data_ref() else { continue };
            length += data.len();
            if self.is_plain {
                let room = EXCERPT_BYTES_MAX - self.beginning.len();
                self.beginning.extend_from_slice(&data[..data.len().min(room)]);
            }
            if length > BODY_BYTES_MAX {
                return false;
            }
        }
        true
    }

    fn into_answer(self) -> Answer {
        Answer { status: self.status, excerpt: excerpt(&self.beginning), retry_after: self.retry_after }
    }
}

fn excerpt(beginning: &[u8]) -> String {
    let mut text = String::new();
    let cleaned = String::from_utf8_lossy(beginning);
    let cleaned = cleaned.chars().map(|c| if c.is_ascii_whitespace() { ' ' } else { c }).filter(|c| !c.is_control());
    for c in cleaned {
        // What is not text takes three bytes where it had one.
        if text.len() + c.len_utf8() > EXCERPT_BYTES_MAX {
            break;
        }
        text.push(c);
    }
    text
}

/// In seconds or as a date; what is neither is as if it were not there.
fn retry_after(headers: &HeaderMap, now: impl FnOnce() -> SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    let wait = if is_number {
        value.parse().map_or(RETRY_AFTER_MAX, Duration::from_secs) // too many digits are a long time, too
    } else {
        httpdate::parse_http_date(value).ok()?.duration_since(now()).unwrap_or_default()
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

impl Failure {
    pub(crate) fn new(class: ErrorClass, text: impl fmt::Display) -> Failure {
        Failure { class, text: text.to_string() }
    }

    /// What became of a connection that stood.
    fn of(error: &hyper::Error) -> Failure {
        // The innermost knows best.
        let known = dial::causes(error).filter_map(|cause| Some((class_of(cause)?, cause))).last();
        let (class, cause) = known.unwrap_or((ErrorClass::Protocol, error));
        Failure::new(class, in_words(class, cause))
    }
}

fn class_of(cause: &(dyn Error + 'static)) -> Option<ErrorClass> {
    if let Some(error) = cause.downcast_ref::<hyper::Error>() {
        let has_ended = error.is_incomplete_message() || error.is_canceled() || error.is_closed();
        return Some(if has_ended { ErrorClass::Reset } else { ErrorClass::Protocol });
    }
    let error = cause.downcast_ref::<io::Error>()?;
    // A receiver that wants a certificate of ours says so only after the handshake.
    let is_tls = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
    Some(if is_tls { ErrorClass::Tls } else { ErrorClass::Reset })
}

fn in_words(class: ErrorClass, cause: &dyn Error) -> String {
    match class {
        ErrorClass::Reset => format!("the connection ended before an answer came: {cause}"),
        ErrorClass::Protocol => format!("the answer is not HTTP that we understand: {cause}"),
        ErrorClass::Dns
        | ErrorClass::AddressRefused
        | ErrorClass::Connect
        | ErrorClass::Proxy
        | ErrorClass::Tls
        | ErrorClass::Timeout => cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date_and_at_most_an_hour() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let read = |value: &str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::try_from(value).unwrap())]);
            retry_after(&headers, || now).map(|wait| wait.as_secs())
        };
        for (value, seconds) in [
            ("0", Some(0)),
            ("120", Some(120)),
            (" 7 ", Some(7)),
            ("3601", Some(3_600)),
            ("99999999999999999999999999", Some(3_600)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:48:37 GMT", Some(0)),
            ("Sat, 06 Nov 2094 08:49:37 GMT", Some(3_600)),
            ("soon", None),
            ("-1", None),
            ("1.5", None),
            ("", None),
        ] {
            assert_eq!(read(value), seconds, "{value}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), || now), None);
    }

    #[test]
    fn an_excerpt_is_one_line_of_text_whatever_came() {
        assert_eq!(excerpt(b"{\n\t\"a\": \"\x00\x1b[31m\xc3\xbc\x7f\xc2\x85\"}"), "{  \"a\": \"[31m\u{fc}\"}");
        assert_eq!(excerpt(b"\xff"), "\u{fffd}");
        assert!(excerpt(&[0xff; 1024]).len() <= 1024);
        assert!(excerpt("\u{fc}".repeat(512).as_bytes()).len() == 1024);
    }

    #[test]
    fn a_class_is_stored_by_the_name_that_it_is_shown_with() {
        for class in [
            ErrorClass::Dns,
            ErrorClass::AddressRefused,
            ErrorClass::Connect,
            ErrorClass::Proxy,
            ErrorClass::Tls,
            ErrorClass::Timeout,
            ErrorClass::Reset,
            ErrorClass::Protocol,
        ] {
            assert_eq!(serde_json::to_value(class).unwrap(), class.as_str());
        }
    }
}
