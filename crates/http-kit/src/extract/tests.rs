//! Tests of the extractors.

use super::*;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    #[allow(dead_code)]
    lines: Vec<Line>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[allow(dead_code)]
    count: u32,
}

fn rejected(body: &[u8]) -> Problem {
    parse_json::<Order>(body).unwrap_err()
}

#[test]
fn an_invalid_field_is_identified_by_its_pointer() {
    let problem = rejected(br#"{"lines":[{"count":1},{"count":"two"}]}"#);
    assert_eq!(problem.status(), StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(problem.errors()[0].pointer, "/lines/1/count");
    assert_eq!(problem.errors()[0].detail, "must be a whole number from 0 to 4294967295");
}

#[test]
fn a_missing_or_unknown_field_is_named() {
    for (body, pointer, detail) in [
        (&br#"{"lines":[],"color":"red"}"#[..], "/color", "does not exist; the only accepted name is lines"),
        (br#"{"lines":[{"count":1,"a/b":2}]}"#, "/lines/0/a~1b", "does not exist; the only accepted name is count"),
        (br#"{"lines":[{}]}"#, "/lines/0/count", "is required"),
        (br#"{"lines":{}}"#, "/lines", "must be a list"),
    ] {
        let problem = rejected(body);
        assert_eq!((problem.errors()[0].pointer.as_str(), problem.errors()[0].detail.as_str()), (pointer, detail));
    }
}

#[test]
fn an_unknown_name_is_answered_with_the_accepted_ones() {
    #[derive(Debug, Deserialize)]
    struct Key {
        #[allow(dead_code)]
        role: crate::caller::Role,
    }
    let problem = parse_json::<Key>(br#"{"role":"king"}"#).unwrap_err();
    assert_eq!(problem.to_string(), "422 validation-failed: role: must be ingest, manage or admin");
    assert_eq!(problem.errors()[0].pointer, "/role");
    let problem = parse_json::<Key>(br#"{"role":5}"#).unwrap_err();
    assert_eq!(problem.to_string(), "422 validation-failed: role: must be a string");
    let problem = parse_query::<Key>("role=king").unwrap_err();
    assert_eq!(problem.to_string(), "400 malformed-query: role: must be ingest, manage or admin");
    assert_eq!(problem.errors()[0].pointer, "/role");
}

#[test]
fn malformed_json_is_a_bad_request() {
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    for body in [&b"{\"lines\":"[..], b"", b"{} {}", b"\xff\xfe", b"{\"lines\":[], \"a\":\"\\u0000\"}", &deep] {
        assert_eq!(rejected(body).status().as_u16() / 100, 4);
    }
    let deep_value = parse_json::<serde_json::Value>(&deep).unwrap_err();
    assert_eq!(deep_value.code(), "validation-failed");
}

#[test]
fn only_a_real_escape_of_nul_is_rejected() {
    assert!(escapes_nul(r#""\u0000""#));
    assert!(escapes_nul(r#""\\\u0000""#));
    assert!(!escapes_nul(r#""\\u0000""#));
    assert!(!escapes_nul(r#""\u0001""#));
}

#[test]
fn the_invalid_one_of_several_path_parameters_is_named() {
    /// Its error comes from the conversion, as of a type that accepts a number or a word.
    #[derive(Debug, Deserialize)]
    #[serde(try_from = "String")]
    struct NumberOrAll;

    impl TryFrom<String> for NumberOrAll {
        type Error = &'static str;

        fn try_from(text: String) -> Result<NumberOrAll, &'static str> {
            if text == "all" || text.parse::<i64>().is_ok() { Ok(NumberOrAll) } else { Err("must be a number, or all") }
        }
    }

    #[derive(Debug, Deserialize)]
    struct Recipient {
        #[allow(dead_code)]
        kind: String,
        #[allow(dead_code)]
        number: NumberOrAll,
        #[allow(dead_code)]
        user: uuid::Uuid,
    }

    let user = "0197a1f2-7c3e-7d4a-9b1c-2f3e4d5a6b7c";
    for (number, user, expected) in [("x", user, "/number"), ("all", "y", "/user")] {
        let router = axum::Router::new()
            .route("/{kind}/{number}/{user}", axum::routing::get(|Path(_): Path<Recipient>| async {}));
        let request = Request::get(format!("/a/{number}/{user}")).body(Body::empty()).unwrap();
        let answer = tower::ServiceExt::oneshot(router, request);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let answer = runtime.block_on(answer).unwrap();
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
        let body = runtime.block_on(answer.into_body().collect()).unwrap().to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["errors"][0]["pointer"], expected, "{body}");
    }
}
