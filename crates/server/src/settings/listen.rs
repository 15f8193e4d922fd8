//! The setting `listen`: the address of the HTTP server.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};

use serde::de::{Deserializer, Error, Visitor};

const EXPECTED: &str = "an address and port such as 127.0.0.1:8080 or localhost:8080, or a port such as 8080";

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("must be {EXPECTED}")]
pub(crate) struct InvalidAddress;

/// Parses an address with a port, `localhost` with a port, or a port of this machine alone. Fails with the accepted forms.
///
/// `localhost` is not resolved: it may be an address of each IP version, and the server listens on one.
pub(crate) fn parse(text: &str) -> Result<SocketAddr, InvalidAddress> {
    let port = |text: &str| text.parse().ok().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let parsed = text.parse().ok().or_else(|| port(text.strip_prefix("localhost:").unwrap_or(text)));
    parsed.ok_or(InvalidAddress)
}

/// For serde: text in one of the forms of [`parse`], or the port as a number.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    deserializer.deserialize_any(ListenVisitor)
}

struct ListenVisitor;

impl Visitor<'_> for ListenVisitor {
    type Value = SocketAddr;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<SocketAddr, E> {
        parse(text).map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, port: i64) -> Result<SocketAddr, E> {
        self.visit_str(&port.to_string())
    }

    fn visit_u64<E: Error>(self, port: u64) -> Result<SocketAddr, E> {
        self.visit_str(&port.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_be_a_port_or_localhost() {
        for (text, expected) in [
            ("8080", "127.0.0.1:8080"),
            ("0", "127.0.0.1:0"),
            ("localhost:8080", "127.0.0.1:8080"),
            ("127.0.0.1:8080", "127.0.0.1:8080"),
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(parse(text), Ok(expected.parse().unwrap()), "{text}");
        }
        for text in ["", "localhost", "0.0.0.0", "65536", "-1", ":8080", "example.com:80", "localhost:http"] {
            assert!(parse(text).unwrap_err().to_string().contains("localhost:8080"), "{text}");
        }
    }
}
