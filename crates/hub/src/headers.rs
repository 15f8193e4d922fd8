//! Headers that a subscriber wants on its deliveries.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue};

const COUNT_MAX: usize = 20;
const BYTES_MAX: usize = 8 * 1024;

/// Ours to set, or about one connection and not about the message. `user-agent` is not among them: some receivers' firewalls
/// want a certain one, and it is the receiver who sets it here.
const OURS: [&str; 16] = [
    "accept-encoding", // answers are not decompressed
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
const OUR_PREFIXES: [&str; 2] = ["webhook-", "proxy-"];

/// A header that is not taken, or all of them (an empty name), and a sentence that says why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub name: String,
    pub detail: String,
}

/// The headers ready for use, their values marked sensitive: they may hold a token, and do not print.
///
/// # Errors
/// Every header that is not taken.
pub fn check(headers: &BTreeMap<String, String>) -> Result<HeaderMap, Vec<Refused>> {
    let mut refused = Vec::new();
    if headers.len() > COUNT_MAX {
        let detail = format!("takes at most {COUNT_MAX} headers");
        return Err(vec![Refused { name: String::new(), detail }]);
    }
    if headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > BYTES_MAX {
        let detail = format!("takes at most {BYTES_MAX} bytes of names and values in total");
        return Err(vec![Refused { name: String::new(), detail }]);
    }
    let mut checked = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        match check_one(name, value) {
            // Names differ by case only.
            Ok((key, _)) if checked.contains_key(&key) => {
                refused.push(Refused { name: name.clone(), detail: format!("`{key}` is there twice") });
            }
            Ok((key, value)) => {
                checked.insert(key, value);
            }
            Err(detail) => refused.push(Refused { name: name.clone(), detail }),
        }
    }
    if refused.is_empty() { Ok(checked) } else { Err(refused) }
}

fn check_one(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), String> {
    let key = HeaderName::try_from(name)
        .map_err(|_| format!("{name:?} is not a header's name: it takes letters, digits and any of !#$%&'*+-.^_`|~"))?;
    let text = key.as_str();
    if OURS.contains(&text) || OUR_PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
        return Err(format!("`{text}` is set by us: it takes any header but webhook-*, proxy-*, {}", OURS.join(", ")));
    }
    // Obsolete bytes above ASCII are legal in HTTP, but receivers disagree on what they mean.
    let visible = |c: char| c == ' ' || c == '\t' || c.is_ascii_graphic();
    let mut value = Some(value)
        .filter(|value| value.chars().all(visible) && value.trim() == *value)
        .and_then(|value| HeaderValue::try_from(value).ok())
        .ok_or_else(|| {
            format!("`{text}` takes a value of visible ASCII characters, with spaces and tabs in between only")
        })?;
    value.set_sensitive(true);
    Ok((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(headers: &[(&str, &str)]) -> Result<HeaderMap, Vec<Refused>> {
        check(&headers.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
    }

    #[test]
    fn ordinary_headers_pass_and_do_not_print() {
        let headers =
            checked(&[("Authorization", "Bearer hunter2"), ("x-team", "a b"), ("User-Agent", "us"), ("x-empty", "")]);
        let headers = headers.unwrap();
        assert_eq!(headers["authorization"], "Bearer hunter2");
        assert_eq!(headers.len(), 4);
        assert!(!format!("{headers:?}").contains("hunter2"));
    }

    #[test]
    fn what_is_ours_or_not_http_is_refused_by_name() {
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
    fn count_and_size_are_bounded() {
        let many = |count: usize| check(&(0..count).map(|n| (format!("x-{n}"), String::new())).collect());
        assert!(many(20).is_ok());
        assert!(many(21).unwrap_err()[0].detail.contains("20"));
        let long = |length: usize| checked(&[("x-long", &"a".repeat(length))]);
        assert!(long(8 * 1024 - 6).is_ok());
        assert!(long(8 * 1024 - 5).unwrap_err()[0].detail.contains("8192"));
    }
}
