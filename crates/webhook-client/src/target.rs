//! The URL of an endpoint, parsed once into the parts that each request needs.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderValue, Uri};
use url::{Host, Url};

use crate::identity::ClientIdentity;

/// Characters of a URL as the caller writes it. Percent-encoded it may have four times as many.
const CHARS_MAX: usize = 2_000;

/// An `http` or `https` URL that a request can be sent to. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    uri: Uri,
    /// Path and query, for the request line.
    path: Uri,
    /// Scheme, host and port.
    origin: Arc<str>,
    /// Targets with the same key share connections: those with the same origin and the same identity.
    connection_key: Arc<str>,
    identity: Option<Arc<ClientIdentity>>,
    /// The `host` header, built once here instead of once per request.
    host: HeaderValue,
    ip_address: Option<IpAddr>,
    port: u16,
    is_https: bool,
}

/// A text that is not the URL of an endpoint: the accepted form. The schemes are `https`, or `http or https`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTarget {
    /// The text is too long.
    #[error("must be a URL of at most {CHARS_MAX} characters")]
    TooLong,
    /// The text is too long when it is percent-encoded.
    #[error("must be a URL of at most {} characters when percent-encoded", 4 * CHARS_MAX)]
    TooLongEncoded,
    /// The text contains white space or control characters.
    #[error("must be a URL without spaces, line breaks and control characters: percent-encode them")]
    Blanks,
    /// The text contains other characters that must be percent-encoded.
    #[error("must be a URL of plain characters: percent-encode the others")]
    NotPlain,
    /// The text is not an absolute URL.
    #[error("must be an absolute {0} URL, such as https://example.com/webhooks")]
    NotAbsolute(&'static str),
    /// The URL has another scheme.
    #[error("must be an {0} URL")]
    Scheme(&'static str),
    /// The URL has no host.
    #[error("must be an {0} URL with a host")]
    NoHost(&'static str),
    /// The host is neither a name nor an IP address.
    #[error("must be an {0} URL with a valid host name or IP address")]
    Host(&'static str),
    /// The port is out of range.
    #[error("must be an {0} URL with a port from 1 to 65535, or without one")]
    Port(&'static str),
    /// The URL contains credentials.
    #[error("must be a URL without user name and password: send them in a header instead")]
    Credentials,
    /// The URL has a fragment.
    #[error("must be a URL without a fragment (`#`), which is never sent")]
    Fragment,
}

impl Target {
    /// Parses a URL.
    ///
    /// # Errors
    /// Describes the accepted form: `must be ...`.
    pub fn parse(text: &str, https_only: bool) -> Result<Target, InvalidTarget> {
        let schemes = if https_only { "https" } else { "http or https" };
        if text.chars().count() > CHARS_MAX {
            return Err(InvalidTarget::TooLong);
        }
        // The URL standard removes some of them silently, even in the middle of the host.
        if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(InvalidTarget::Blanks);
        }
        let url = Url::parse(text).map_err(|error| unparsable(schemes, error))?;
        let is_https = match url.scheme() {
            "https" => true,
            "http" if !https_only => false,
            _ => return Err(InvalidTarget::Scheme(schemes)),
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(InvalidTarget::Credentials);
        }
        if url.fragment().is_some() {
            return Err(InvalidTarget::Fragment);
        }
        // The host as the URL standard parses it: `0x7f.1`, `2130706433` and `127.0.0.1.` are all 127.0.0.1.
        let ip_address = match url.host() {
            Some(Host::Domain(_)) => None,
            Some(Host::Ipv4(address)) => Some(IpAddr::from(address)),
            Some(Host::Ipv6(address)) => Some(IpAddr::from(address)),
            None => return Err(InvalidTarget::NoHost(schemes)),
        };
        if url.as_str().len() > 4 * CHARS_MAX {
            return Err(InvalidTarget::TooLongEncoded);
        }
        let uri = Uri::try_from(url.as_str()).map_err(|_| InvalidTarget::NotPlain)?;
        let authority = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let host = HeaderValue::try_from(authority).map_err(|_| InvalidTarget::NotPlain)?;
        let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let path = Uri::try_from(path).map_err(|_| InvalidTarget::NotPlain)?;
        let origin: Arc<str> = url[..url::Position::AfterPort].into();
        let port = url.port_or_known_default().unwrap_or(if is_https { 443 } else { 80 });
        let (connection_key, identity) = (Arc::clone(&origin), None);
        Ok(Target { uri, path, origin, connection_key, identity, host, ip_address, port, is_https })
    }

    /// The same URL, with a certificate for the endpoint. No request without this identity uses its connections, and none
    /// with it uses those of others.
    #[must_use]
    pub fn with_identity(self, identity: Arc<ClientIdentity>) -> Target {
        let connection_key = format!("{} {}", self.origin, identity.name()).into();
        Target { connection_key, identity: Some(identity), ..self }
    }

    /// The URL as it is sent.
    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    pub(crate) fn path(&self) -> &Uri {
        &self.path
    }

    /// Scheme, host and port. Targets with the same origin belong to the same server.
    pub fn origin(&self) -> &Arc<str> {
        &self.origin
    }

    /// Targets with the same key share connections.
    pub fn connection_key(&self) -> &Arc<str> {
        &self.connection_key
    }

    /// The certificate with which the client authenticates itself, if the endpoint requires one.
    pub fn identity(&self) -> Option<&ClientIdentity> {
        self.identity.as_deref()
    }

    /// The `host` header: the host, and the port unless it is the scheme's default.
    pub(crate) fn host(&self) -> &HeaderValue {
        &self.host
    }

    /// The IP address if the URL contains one instead of a name: it is not resolved.
    pub(crate) fn ip_address(&self) -> Option<IpAddr> {
        self.ip_address
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Whether the scheme is https.
    pub fn is_https(&self) -> bool {
        self.is_https
    }
}

/// Returns what a URL that cannot be parsed must be like.
fn unparsable(schemes: &'static str, error: url::ParseError) -> InvalidTarget {
    use url::ParseError;
    match error {
        ParseError::InvalidPort => InvalidTarget::Port(schemes),
        ParseError::EmptyHost
        | ParseError::IdnaError
        | ParseError::InvalidIpv4Address
        | ParseError::InvalidIpv6Address
        | ParseError::InvalidDomainCharacter => InvalidTarget::Host(schemes),
        _ => InvalidTarget::NotAbsolute(schemes),
    }
}

/// Prints the host only: paths and queries of webhooks often contain a secret.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({:?})", self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        Target::parse(text, false).unwrap().uri().to_string()
    }

    #[test]
    fn a_url_is_normalised_to_the_form_that_is_sent() {
        assert_eq!(parsed("https://example.com"), "https://example.com/");
        assert_eq!(parsed("HTTP://EXAMPLE.com:80/a/../b?q=1&r"), "http://example.com/b?q=1&r");
        assert_eq!(parsed("https://example.com:8443/ü?ü"), "https://example.com:8443/%C3%BC?%C3%BC");
        assert_eq!(parsed("https://bücher.example/"), "https://xn--bcher-kva.example/");
        assert_eq!(parsed("http://[::FFFF:127.0.0.1]:8080/"), "http://[::ffff:7f00:1]:8080/");
        let target = Target::parse("https://example.com:8443/", false).unwrap();
        assert_eq!(target.host(), "example.com:8443");
        assert_eq!(Target::parse("https://example.com:443/", false).unwrap().host(), "example.com");
    }

    #[test]
    fn the_port_and_the_origin_include_the_default_port_of_the_scheme() {
        let part = |url: &str| {
            let target = Target::parse(url, false).unwrap();
            (target.port(), target.origin().to_string())
        };
        assert_eq!(part("https://example.com/a"), (443, "https://example.com".to_owned()));
        assert_eq!(part("https://EXAMPLE.com:443/b?c"), part("https://example.com/a"));
        assert_eq!(part("http://example.com/"), (80, "http://example.com".to_owned()));
        assert_eq!(part("http://example.com:8080/"), (8080, "http://example.com:8080".to_owned()));
    }

    #[test]
    fn every_spelling_of_an_address_is_recognised() {
        for spelling in [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7F.0.0.0x1",
            "0177.0.0.1",
            "017700000001",
            "127.0.0.1.",
            "%31%32%37.0.0.1",
            "１２７.0.0.1",
            "127。0。0。1",
            "\\127.0.0.1",
        ] {
            let target = Target::parse(&format!("http://{spelling}/"), false).unwrap();
            assert_eq!(target.ip_address(), Some("127.0.0.1".parse().unwrap()), "{spelling}");
        }
        let target = Target::parse("http://[::1]/", false).unwrap();
        assert_eq!(target.ip_address(), Some("::1".parse().unwrap()));
        assert_eq!(Target::parse("http://example.com/", false).unwrap().ip_address(), None);
    }

    #[test]
    fn an_invalid_url_names_the_accepted_form() {
        let long = format!("https://example.com/{}", "a".repeat(1_981));
        assert_eq!(long.chars().count(), 2_001);
        for (text, expected) in [
            ("", "http or https"),
            ("example.com", "absolute"),
            ("/hook", "absolute"),
            ("ftp://example.com/", "http or https"),
            ("file:///etc/passwd", "http or https"),
            ("http://", "host"),
            ("https://user@example.com/", "user name"),
            ("https://:pass@example.com/", "user name"),
            ("https://example.com/#top", "fragment"),
            ("https://exa mple.com/", "spaces"),
            ("https://exam\tple.com/", "spaces"),
            ("https://example.com/\r\nx: y", "spaces"),
            ("https://example.com:99999/", "port"),
            ("http://1.2.3.4.5/", "IP address"),
            ("http://[fe80::1%25eth0]/", "IP address"),
            (long.as_str(), "2000"),
        ] {
            let error = Target::parse(text, false).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(Target::parse(&long[..2_000], false).is_ok());
        assert_eq!(Target::parse("http://example.com/", true), Err(InvalidTarget::Scheme("https")));
        assert!(Target::parse("https://example.com/", true).is_ok());
    }

    #[test]
    fn debug_output_of_a_target_has_no_path() {
        let target = Target::parse("https://hooks.example/T0/hunter2?key=hunter2", false).unwrap();
        assert!(!format!("{target:?}").contains("hunter2"));
    }
}
