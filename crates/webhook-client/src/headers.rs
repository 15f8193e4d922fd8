//! Checks the custom headers that the requests to an endpoint carry.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue};

/// Headers per endpoint.
const COUNT_MAX: usize = 20;
/// Bytes of all names and values of an endpoint's headers together.
const BYTES_MAX: usize = 8 * 1024;

/// Headers that the sender of webhooks sets, or that concern a single connection. `user-agent` is not among them: the firewalls of
/// some receivers require a particular one.
const RESERVED: [&str; 16] = [
    "accept-encoding", // responses are not decompressed
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
];
const RESERVED_PREFIXES: [&str; 2] = ["webhook-", "proxy-"];

/// Why a header is refused, or all of them together (with an empty name).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderError {
    /// The name as it was given.
    pub name: String,
    /// What is accepted.
    pub detail: String,
}

/// Returns the headers ready for a request. Their values may contain tokens, so they are marked sensitive and not
/// printed.
///
/// # Errors
/// Every header that is refused, with the reason.
pub fn check(headers: &BTreeMap<String, String>) -> Result<HeaderMap, Vec<HeaderError>> {
    let mut refused = Vec::new();
    if headers.len() > COUNT_MAX {
        let detail = format!("must be at most {COUNT_MAX} headers");
        return Err(vec![HeaderError { name: String::new(), detail }]);
    }
    if headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > BYTES_MAX {
        let detail = format!("must be at most {BYTES_MAX} bytes of names and values in total");
        return Err(vec![HeaderError { name: String::new(), detail }]);
    }
    let mut checked = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        match check_one(name, value) {
            // The two names differ only in case.
            Ok((key, _)) if checked.contains_key(&key) => {
                refused.push(HeaderError {
                    name: name.clone(),
                    detail: format!("`{key}` is given twice: names are case-insensitive"),
                });
            }
            Ok((key, value)) => {
                checked.insert(key, value);
            }
            Err(error) => refused.push(error),
        }
    }
    if refused.is_empty() { Ok(checked) } else { Err(refused) }
}

fn check_one(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), HeaderError> {
    let refused = |detail: String| HeaderError { name: name.to_owned(), detail };
    let key = HeaderName::try_from(name).map_err(|_| {
        refused(format!("{name:?} is not a header name: it must consist of letters, digits and !#$%&'*+-.^_`|~"))
    })?;
    let text = key.as_str();
    if RESERVED.contains(&text) || RESERVED_PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
        let reserved = RESERVED.join(", ");
        return Err(refused(format!("`{text}` is reserved: use a header other than webhook-*, proxy-*, {reserved}")));
    }
    // Bytes above ASCII are legal in HTTP but obsolete: receivers disagree on their encoding.
    let visible = |c: char| c == ' ' || c == '\t' || c.is_ascii_graphic();
    let mut value = Some(value)
        .filter(|value| value.chars().all(visible) && value.trim() == *value)
        .and_then(|value| HeaderValue::try_from(value).ok())
        .ok_or_else(|| {
            let accepted = "a value of visible ASCII characters, with spaces and tabs only in between";
            refused(format!("`{text}` must have {accepted}"))
        })?;
    value.set_sensitive(true);
    Ok((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(headers: &[(&str, &str)]) -> Result<HeaderMap, Vec<HeaderError>> {
        check(&headers.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
    }

    #[test]
    fn ordinary_headers_are_accepted_and_their_values_not_printed() {
        let headers =
            checked(&[("Authorization", "Bearer hunter2"), ("x-team", "a b"), ("User-Agent", "us"), ("x-empty", "")]);
        let headers = headers.unwrap();
        assert_eq!(headers["authorization"], "Bearer hunter2");
        assert_eq!(headers.len(), 4);
        assert!(!format!("{headers:?}").contains("hunter2"));
    }

    #[test]
    fn reserved_and_malformed_headers_are_refused_by_name() {
        for name in [
            "webhook-id",
            "Webhook-Signature",
            "webhook-anything",
            "Host",
            "content-length",
            "Content-Type",
            "connection",
            "transfer-encoding",
            "te",
            "trailer",
            "upgrade",
            "keep-alive",
            "proxy-authorization",
            "Proxy-Connection",
            "expect",
            "accept-encoding",
            "traceparent",
        ] {
            let refused = checked(&[(name, "x"), ("x-good", "x")]).unwrap_err();
            assert_eq!(refused.len(), 1, "{name}");
            assert_eq!(refused[0].name, name);
            assert!(refused[0].detail.contains(&format!("`{}`", name.to_lowercase())), "{:?}", refused[0]);
        }
        for name in ["", "x y", "x:y", "x\r\ny", "ü"] {
            assert!(checked(&[(name, "x")]).unwrap_err()[0].detail.contains("letters"), "{name:?}");
        }
        for value in ["a\r\nhost: b", "a\nb", "a\0", "ü", " a", "a ", "\u{7f}"] {
            let refused = checked(&[("x-bad", value)]).unwrap_err();
            assert!(refused[0].detail.contains("`x-bad`") && refused[0].detail.contains("ASCII"), "{value:?}");
        }
        assert!(checked(&[("X-A", "1"), ("x-a", "2")]).unwrap_err()[0].detail.contains("twice"));
    }

    #[test]
    fn the_number_and_size_of_headers_are_bounded() {
        let many = |count: usize| check(&(0..count).map(|n| (format!("x-{n}"), String::new())).collect());
        assert!(many(20).is_ok());
        assert!(many(21).unwrap_err()[0].detail.contains("20"));
        let long = |length: usize| checked(&[("x-long", &"a".repeat(length))]);
        assert!(long(8 * 1024 - 6).is_ok());
        assert!(long(8 * 1024 - 5).unwrap_err()[0].detail.contains("8192"));
    }
}
