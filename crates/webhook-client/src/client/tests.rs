//! Tests of the HTTP client.

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
fn an_excerpt_of_any_bytes_is_one_line_of_text() {
    assert_eq!(excerpt(b"{\n\t\"a\": \"\x00\x1b[31m\xc3\xbc\x7f\xc2\x85\"}"), "{  \"a\": \"[31m\u{fc}\"}");
    assert_eq!(excerpt(b"\xff"), "\u{fffd}");
    assert!(excerpt(&[0xff; 1024]).len() <= 1024);
    assert!(excerpt("\u{fc}".repeat(512).as_bytes()).len() == 1024);
}

#[test]
fn the_stored_names_of_error_classes_are_stable() {
    for (class, name) in [
        (ErrorClass::Dns, "dns"),
        (ErrorClass::AddressRefused, "address_refused"),
        (ErrorClass::Oauth2, "oauth2"),
        (ErrorClass::Connect, "connect"),
        (ErrorClass::Proxy, "proxy"),
        (ErrorClass::Tls, "tls"),
        (ErrorClass::Timeout, "timeout"),
        (ErrorClass::Reset, "reset"),
        (ErrorClass::Protocol, "protocol"),
    ] {
        assert_eq!(class.as_str(), name);
    }
}
