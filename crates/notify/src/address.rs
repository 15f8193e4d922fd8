//! Addresses of recipients.

use lettre::Address;
use url::Host;

/// The longest address, in bytes.
const BYTES_MAX: usize = 254;

/// The address is invalid. The text does not quote it: addresses are personal data.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the recipient is not a valid e-mail address")]
pub(crate) struct InvalidAddress;

/// Parses an address without a display name. The domain becomes lower-case ASCII (`bücher.example` is
/// `xn--bcher-kva.example`), because few mail servers accept another one.
pub(crate) fn parse(text: &str) -> Result<Address, InvalidAddress> {
    let is_unexpected = |c: char| c.is_control() || c.is_whitespace();
    if text.len() > BYTES_MAX || text.contains(is_unexpected) {
        return Err(InvalidAddress);
    }
    let address: Address = text.parse().map_err(|_| InvalidAddress)?;
    if address.domain().starts_with('[') {
        return Ok(address);
    }
    match Host::parse(address.domain()) {
        Ok(Host::Domain(domain)) => Address::new(address.user(), domain).map_err(|_| InvalidAddress),
        Ok(Host::Ipv4(_) | Host::Ipv6(_)) | Err(_) => Err(InvalidAddress),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_one_recipient_and_nothing_else() {
        for (text, parsed) in [
            ("ada@example.org", "ada@example.org"),
            ("Ada+tag@EXAMPLE.org", "Ada+tag@example.org"),
            ("jürgen@bücher.example", "jürgen@xn--bcher-kva.example"),
            ("ada@localhost", "ada@localhost"),
            ("ada@[127.0.0.1]", "ada@[127.0.0.1]"),
        ] {
            assert_eq!(parse(text).map(|address| address.to_string()).as_deref(), Ok(parsed), "{text}");
        }
        let long = format!("{}@example.org", "a".repeat(250));
        for text in [
            "",
            "ada",
            "@example.org",
            "ada@",
            "ada@example.org, bob@example.org",
            "ada@example.org\r\nRCPT TO:<bob@example.org>",
            "ada@example.org\nBcc: bob@example.org",
            "Ada <ada@example.org>",
            "<ada@example.org>",
            "ada@exa mple.org",
            "ada@127.0.0.1",
            "ada@example.org>",
            "a\0da@example.org",
            &long,
        ] {
            assert_eq!(parse(text), Err(InvalidAddress), "{text:?}");
        }
    }
}
