//! Where a webhook goes: a subscriber's URL, read once and kept ready for use.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderValue, Uri};
use url::{Host, Url};

const CHARS_MAX: usize = 2_000;

/// An `http` or `https` URL that a request can be sent to. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    uri: Uri,
    /// Path and query: what the first line of a request says.
    path: Uri,
    /// Scheme and authority: targets that share them share connections.
    origin: Arc<str>,
    /// The `host` header: built here, not once a request.
    host: HeaderValue,
    literal: Option<IpAddr>,
    is_https: bool,
}

impl Target {
    /// # Errors
    /// A sentence that says what it takes.
    pub fn parse(text: &str, https_only: bool) -> Result<Target, String> {
        let schemes = if https_only { "https" } else { "http or https" };
        if text.chars().count() > CHARS_MAX {
            return Err(format!("takes a URL of at most {CHARS_MAX} characters"));
        }
        // The URL standard would drop them silently, also in the middle of the host.
        if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err("takes a URL without spaces, line ends and control characters: percent-encode them".to_owned());
        }
        let url = Url::parse(text).map_err(|error| format!("takes an absolute {schemes} URL: {error}"))?;
        let is_https = match url.scheme() {
            "https" => true,
            "http" if !https_only => false,
            _ => return Err(format!("takes an {schemes} URL")),
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err("takes a URL without user name and password: put them into a header".to_owned());
        }
        if url.fragment().is_some() {
            return Err("takes a URL without a fragment (`#`), which is never sent".to_owned());
        }
        // The host as the URL standard reads it: `0x7f.1`, `2130706433` and `127.0.0.1.` are all 127.0.0.1.
        let literal = match url.host() {
            Some(Host::Domain(_)) => None,
            Some(Host::Ipv4(address)) => Some(IpAddr::from(address)),
            Some(Host::Ipv6(address)) => Some(IpAddr::from(address)),
            None => return Err(format!("takes an {schemes} URL with a host")),
        };
        let unusable = |_| "takes a URL of plain characters: percent-encode the others".to_owned();
        if url.as_str().len() > 4 * CHARS_MAX {
            return Err(format!("takes a URL of at most {} characters once percent-encoded", 4 * CHARS_MAX));
        }
        let uri = Uri::try_from(url.as_str()).map_err(|error| unusable(error.to_string()))?;
        let authority = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let host = HeaderValue::try_from(authority).map_err(|error| unusable(error.to_string()))?;
        let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let path = Uri::try_from(path).map_err(|error| unusable(error.to_string()))?;
        let origin = url[..url::Position::AfterPort].into();
        Ok(Target { uri, path, origin, host, literal, is_https })
    }

    pub(crate) fn uri(&self) -> &Uri {
        &self.uri
    }

    pub(crate) fn path(&self) -> &Uri {
        &self.path
    }

    pub(crate) fn origin(&self) -> &Arc<str> {
        &self.origin
    }

    /// What the `host` header says: host, and port unless it is the scheme's own.
    pub(crate) fn host(&self) -> &HeaderValue {
        &self.host
    }

    /// The address, if the URL names one: no DNS is asked then.
    pub(crate) fn literal(&self) -> Option<IpAddr> {
        self.literal
    }

    pub fn is_https(&self) -> bool {
        self.is_https
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.uri.fmt(f)
    }
}

/// Scheme and host only: paths and queries of webhooks often hold a secret.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({:?})", self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        Target::parse(text, false).unwrap().to_string()
    }

    #[test]
    fn a_url_is_kept_as_it_will_be_sent() {
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
    fn odd_spellings_of_an_address_are_that_address() {
        for odd in [
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
            let target = Target::parse(&format!("http://{odd}/"), false).unwrap();
            assert_eq!(target.literal(), Some("127.0.0.1".parse().unwrap()), "{odd}");
        }
        let target = Target::parse("http://[::1]/", false).unwrap();
        assert_eq!(target.literal(), Some("::1".parse().unwrap()));
        assert_eq!(Target::parse("http://example.com/", false).unwrap().literal(), None);
    }

    #[test]
    fn what_is_refused_says_what_it_takes() {
        let long = format!("https://example.com/{}", "a".repeat(1_981));
        assert_eq!(long.chars().count(), 2_001);
        for (text, says) in [
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
            ("http://1.2.3.4.5/", "IPv4"),
            ("http://[fe80::1%25eth0]/", "IPv6"),
            (long.as_str(), "2000"),
        ] {
            let error = Target::parse(text, false).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
        assert!(Target::parse(&long[..2_000], false).is_ok());
        assert!(Target::parse("http://example.com/", true).unwrap_err().contains("https URL"));
        assert!(Target::parse("https://example.com/", true).is_ok());
    }

    #[test]
    fn a_target_prints_without_its_path_in_logs() {
        let target = Target::parse("https://hooks.example/T0/hunter2?key=hunter2", false).unwrap();
        assert!(!format!("{target:?}").contains("hunter2"));
    }
}
