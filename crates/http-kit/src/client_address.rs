//! The address of a client, also behind proxies. Limits count by it.
//!
//! A client can send any header, so a header is believed only as far as trusted proxies have written it: each of them
//! appends the address that it was called from. The client is the last address of the list that is not a trusted proxy.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::{HeaderMap, HeaderName, header};
use serde::{Deserialize, Serialize};

use runtime::network::Network;

/// The address of the client. The server adds it to the extensions of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientAddress(pub IpAddr);

impl ClientAddress {
    /// Returns the network of the client, for limits: the address itself, or the /64 network of an IPv6 address, because one
    /// host can use all addresses of its /64.
    pub fn network(self) -> IpAddr {
        match self.0.to_canonical() {
            IpAddr::V4(v4) => IpAddr::V4(v4),
            IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) >> 64 << 64).into()),
        }
    }
}

/// The header in which the proxies in front pass on the address of their client. There is only one, because a proxy that
/// writes one of them passes on the other as the client has sent it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForwardedHeader {
    #[default]
    XForwardedFor,
    /// RFC 7239.
    Forwarded,
}

/// The proxies whose header is believed. By default there are none, and the client is the peer of the connection.
#[derive(Debug, Clone, Default)]
pub struct TrustedProxies {
    networks: Arc<[Network]>,
    header: ForwardedHeader,
}

impl TrustedProxies {
    pub fn new(networks: &[Network], header: ForwardedHeader) -> TrustedProxies {
        TrustedProxies { networks: networks.into(), header }
    }

    /// Returns the address of the client: the last address in the header that is not a trusted proxy. The peer of the
    /// connection itself if it is not a trusted proxy, or if the header is absent or malformed up to that address.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> ClientAddress {
        let forwarded = || match self.header {
            ForwardedHeader::XForwardedFor => self.last_untrusted(x_forwarded_for(headers)),
            ForwardedHeader::Forwarded => self.last_untrusted(forwarded(headers)),
        };
        let client = if self.contains(peer) { forwarded() } else { None };
        ClientAddress(client.unwrap_or(peer))
    }

    fn contains(&self, address: IpAddr) -> bool {
        // A socket for IPv6 reports the peers of IPv4 as `::ffff:a.b.c.d`.
        let canonical = address.to_canonical();
        self.networks.iter().any(|network| network.contains(canonical) || network.contains(address))
    }

    /// `addresses`: the last one first; None is a part that is not an address. If all of them are trusted, the client is the
    /// first trusted one. None if a part is malformed, or if there is none.
    fn last_untrusted(&self, addresses: impl Iterator<Item = Option<IpAddr>>) -> Option<IpAddr> {
        let mut first = None;
        for address in addresses {
            let address = address?;
            first = Some(address);
            if !self.contains(address) {
                break;
            }
        }
        first
    }
}

/// The addresses of `X-Forwarded-For`, the last one first. Several headers are one list.
fn x_forwarded_for(headers: &HeaderMap) -> impl Iterator<Item = Option<IpAddr>> {
    const NAME: HeaderName = HeaderName::from_static("x-forwarded-for");
    let values: Vec<_> = headers.get_all(NAME).iter().collect();
    // Part by part: what the client has sent at the beginning of the list must not hide what the proxy has appended.
    let parts = values.into_iter().rev().flat_map(|value| value.as_bytes().rsplit(|byte| *byte == b','));
    parts.map(|part| node_address(std::str::from_utf8(part).ok()?.trim()))
}

/// The addresses `for=` of `Forwarded`, the last one first. Several headers are one list.
fn forwarded(headers: &HeaderMap) -> impl Iterator<Item = Option<IpAddr>> {
    let values: Vec<_> = headers.get_all(header::FORWARDED).iter().collect();
    values.into_iter().rev().flat_map(|value| {
        let text = String::from_utf8_lossy(value.as_bytes());
        // Quotes that the client has not closed must not hide what the proxy has appended, which has no comma in quotes.
        let elements = elements(&text).unwrap_or_else(|| text.split(',').collect());
        elements.into_iter().rev().map(|element| for_of_element(element).flatten()).collect::<Vec<_>>()
    })
}

/// The elements of one header. None if a quote is not closed.
fn elements(text: &str) -> Option<Vec<&str>> {
    let (mut rest, mut elements) = (Some(text), Vec::new());
    while let Some(text) = rest {
        let (element, after) = split_unquoted(text, ',')?;
        elements.push(element);
        rest = after;
    }
    Some(elements)
}

/// The address in the parameter `for` of one element, such as `for="[2001:db8::1]:4711";proto=https`. The outer None: the
/// syntax is invalid. The inner: the header has a name that hides the address.
fn for_of_element(element: &str) -> Option<Option<IpAddr>> {
    let (mut rest, mut found) = (element, None);
    loop {
        let (pair, after) = split_unquoted(rest, ';')?;
        let (name, value) = pair.trim().split_once('=')?;
        if name.eq_ignore_ascii_case("for") {
            let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
            found = node_address(value);
        }
        match after {
            Some(after) => rest = after,
            None => return Some(found),
        }
    }
}

/// Splits at the first separator outside of quotes. None if a quote is not closed.
fn split_unquoted(text: &str, separator: char) -> Option<(&str, Option<&str>)> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            c if c == separator && !is_quoted => return Some((&text[..at], Some(&text[at + separator.len_utf8()..]))),
            _ => {}
        }
    }
    (!is_quoted).then_some((text, None))
}

/// The address of a node: `192.0.2.1`, `192.0.2.1:4711`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:4711`.
fn node_address(text: &str) -> Option<IpAddr> {
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse::<IpAddr>().ok();
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    text.parse().ok().or_else(with_port).or_else(bracketed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn proxies(header: ForwardedHeader) -> TrustedProxies {
        let networks: Vec<Network> =
            ["10.0.0.0/8", "192.0.2.7", "fd00::/8"].iter().map(|network| network.parse().unwrap()).collect();
        TrustedProxies::new(&networks, header)
    }

    fn client_of(proxies: &TrustedProxies, peer: &str, name: &'static str, values: &[&str]) -> String {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        proxies.client(peer.parse().unwrap(), &headers).0.to_string()
    }

    #[test]
    fn without_trusted_proxies_headers_are_ignored() {
        for name in ["x-forwarded-for", "forwarded"] {
            let client = client_of(&TrustedProxies::default(), "10.0.0.1", name, &["203.0.113.9", "for=203.0.113.9"]);
            assert_eq!(client, "10.0.0.1");
        }
    }

    #[test]
    fn the_client_is_the_last_address_that_is_no_trusted_proxy() {
        let proxies = proxies(ForwardedHeader::XForwardedFor);
        for (peer, values, expected) in [
            // A client that calls directly may send what it wants.
            ("203.0.113.9", &["198.51.100.1"][..], "203.0.113.9"),
            ("10.0.0.1", &["203.0.113.9"], "203.0.113.9"),
            ("::ffff:10.0.0.1", &["203.0.113.9"], "203.0.113.9"),
            // The client has sent the beginning of the list itself.
            ("10.0.0.1", &["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
            ("10.0.0.1", &["nonsense, 203.0.113.9"], "203.0.113.9"),
            ("10.0.0.1", &["\u{e9}, 203.0.113.9"], "203.0.113.9"),
            ("10.0.0.1", &["\u{e9}", "203.0.113.9"], "203.0.113.9"),
            // Two proxies, in one header and in two.
            ("10.0.0.1", &["198.51.100.1, 203.0.113.9, 192.0.2.7"], "203.0.113.9"),
            ("10.0.0.1", &["198.51.100.1,203.0.113.9", "fd00::1"], "203.0.113.9"),
            ("10.0.0.1", &["203.0.113.9:4711, [fd00::1]:80"], "203.0.113.9"),
            ("10.0.0.1", &["2001:db8::5"], "2001:db8::5"),
            // The client is in a trusted network itself.
            ("10.0.0.1", &["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
            ("10.0.0.1", &[], "10.0.0.1"),
        ] {
            assert_eq!(client_of(&proxies, peer, "x-forwarded-for", values), expected, "{peer} {values:?}");
        }
        assert_eq!(client_of(&proxies, "10.0.0.1", "forwarded", &["for=203.0.113.9"]), "10.0.0.1", "the other header");
    }

    #[test]
    fn a_malformed_header_falls_back_to_the_peer() {
        let of = |header, name: &'static str, value: &str| client_of(&proxies(header), "10.0.0.1", name, &[value]);
        for value in
            ["", "nonsense", "203.0.113.9, ", "203.0.113.9, nonsense", "203.0.113.9 10.0.0.2", "1.2.3", "\u{e9}"]
        {
            assert_eq!(of(ForwardedHeader::XForwardedFor, "x-forwarded-for", value), "10.0.0.1", "{value}");
        }
        let values =
            ["", "203.0.113.9", "for=\"203.0.113.9", "for=unknown", "for=203.0.113.9, for=_hidden", "proto=http"];
        for value in values {
            assert_eq!(of(ForwardedHeader::Forwarded, "forwarded", value), "10.0.0.1", "{value}");
        }
    }

    #[test]
    fn the_header_of_rfc_7239_is_read() {
        let proxies = proxies(ForwardedHeader::Forwarded);
        for (values, expected) in [
            (&["for=203.0.113.9"][..], "203.0.113.9"),
            (&["For=\"203.0.113.9:4711\";proto=http;by=10.0.0.1"], "203.0.113.9"),
            (&["for=198.51.100.1, for=203.0.113.9;host=\"a,b;c\", for=10.0.0.2"], "203.0.113.9"),
            (&["for=203.0.113.9", "for=\"[fd00::1]:80\""], "203.0.113.9"),
            (&["proto=https;for=\"[2001:db8:cafe::17]:4711\""], "2001:db8:cafe::17"),
            (&["by=\"a\\\",for=198.51.100.1\";for=203.0.113.9"], "203.0.113.9"),
            // What the client has sent is malformed.
            (&["x, for=203.0.113.9"], "203.0.113.9"),
            (&["for=\"x, for=203.0.113.9"], "203.0.113.9"),
            (&["\u{e9}", "for=203.0.113.9"], "203.0.113.9"),
        ] {
            assert_eq!(client_of(&proxies, "10.0.0.1", "forwarded", values), expected, "{values:?}");
        }
        assert_eq!(client_of(&proxies, "203.0.113.9", "forwarded", &["for=198.51.100.1"]), "203.0.113.9");
    }

    #[test]
    fn an_ipv6_client_is_counted_by_its_network() {
        let network = |address: &str| ClientAddress(address.parse().unwrap()).network().to_string();
        assert_eq!(network("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(network("::ffff:203.0.113.9"), "203.0.113.9");
    }
}
