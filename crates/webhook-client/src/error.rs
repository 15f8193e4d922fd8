//! Why a request has no response.

use std::fmt;

/// Why a client cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The resolver of this machine cannot be used.
    #[error("the DNS resolver cannot start: {0}")]
    Resolver(Box<dyn std::error::Error + Send + Sync>),
    /// One of [`ClientSettings::extra_roots`](crate::ClientSettings::extra_roots).
    #[error("an additional root certificate is invalid: {0}")]
    RootCertificate(tokio_rustls::rustls::Error),
    /// The TLS library does not start.
    #[error("TLS cannot start: {0}")]
    Tls(tokio_rustls::rustls::Error),
}

/// Why a request has no response. The text may be shown to the owner of the endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct RequestError {
    /// The kind of failure.
    pub class: ErrorClass,
    /// What went wrong.
    pub text: String,
}

/// The kind of failure of a request without a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ErrorClass {
    /// The host name has no address or could not be resolved. Nothing was sent.
    Dns,
    /// Refused by policy: an address is not public, the port is not permitted, or the URL is plain http where only https
    /// is. Nothing was sent.
    AddressRefused,
    /// The endpoint requires an access token, and there is none. Nothing was sent.
    Oauth2,
    /// TCP could not connect. Nothing was sent.
    Connect,
    /// The operator's proxy is unreachable or refused the connection. Nothing was sent.
    Proxy,
    /// TLS failed, most often because of the certificate. Nothing was sent.
    Tls,
    /// No status arrived within the deadline. The receiver may have processed the request.
    Timeout,
    /// The connection ended before the status arrived. The receiver may have processed the request.
    Reset,
    /// The response is not HTTP/1, or its headers are too large, together with those of interim responses. The receiver may have processed the request.
    Protocol,
}

impl ErrorClass {
    /// The name under which attempts store it and the API shows it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl RequestError {
    pub(crate) fn new(class: ErrorClass, text: impl fmt::Display) -> RequestError {
        RequestError { class, text: text.to_string() }
    }
}
