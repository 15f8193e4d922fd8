//! Malformed, oversized and malicious requests.

use std::time::Duration;

use serde_json::json;
use server::migrations;
use testkit::{Client, TestApp, TestDatabase};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

use crate::events::fixture::meetup_with;
use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, serve};

const REQUESTS: usize = 1_000;
const IN_FLIGHT: usize = 25;

/// One request of each kind, as the bytes that are sent.
fn malicious_requests() -> Vec<(&'static str, Vec<u8>)> {
    let post = |length: usize, body: &[u8]| {
        let head = format!(
            "POST /admin/v1/keys HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    };
    let json = |body: &[u8]| post(body.len(), body);
    let get = |path: &str| {
        let auth = format!("authorization: Bearer {ADMIN_KEY}");
        format!("GET {path} HTTP/1.1\r\nhost: x\r\n{auth}\r\nconnection: close\r\n\r\n").into_bytes()
    };
    let raw = |text: &str| text.as_bytes().to_vec();
    vec![
        ("truncated JSON", json(br#"{"name":"a","role":"#)),
        ("a body of 1 GB announced", post(1_000_000_000, b"{")),
        ("a body of 2 MB sent", json(&[b"\"".to_vec(), vec![b'a'; 2_000_000]].concat())),
        ("deep nesting", json(&[br#"{"name":"#.to_vec(), vec![b'['; 100_000]].concat())),
        ("deep nesting, closed", json(&[vec![b'['; 50_000], vec![b']'; 50_000]].concat())),
        ("NUL escaped", json(br#"{"name":"a\u0000b","role":"ingest"}"#)),
        ("NUL raw", json(b"{\"name\":\"a\0b\",\"role\":\"ingest\"}")),
        ("bad UTF-8", json(b"{\"name\":\"\xff\xfe\",\"role\":\"ingest\"}")),
        ("a lone surrogate", json(br#"{"name":"\ud800","role":"ingest"}"#)),
        ("an unknown field", json(br#"{"name":"a","role":"ingest","color":"red"}"#)),
        ("a wrong type", json(br#"{"name":5,"role":"ingest"}"#)),
        ("an unknown role", json(br#"{"name":"a","role":"root"}"#)),
        ("a name that clears the screen", json(br#"{"name":"\u001b[2Jx","role":"ingest"}"#)),
        ("a blank name", json(br#"{"name":"  ","role":"ingest"}"#)),
        ("no host", raw("GET /readyz HTTP/1.1\r\nconnection: close\r\n\r\n")),
        ("two hosts", raw("GET /readyz HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n")),
        ("an empty name", json(br#"{"name":"","role":"ingest"}"#)),
        ("a tenant that climbs", json(br#"{"name":"a","role":"ingest","tenant":"../etc"}"#)),
        ("a year out of range", json(br#"{"name":"a","role":"ingest","expires_at":"99999-01-01T00:00:00Z"}"#)),
        ("no JSON at all", json(b"<xml/>")),
        ("an empty body", json(b"")),
        ("a huge number", json(br#"{"name":1e999999,"role":"ingest"}"#)),
        ("a wrong method", raw("DELETE /admin/v1/keys HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")),
        ("an invented method", raw("FROBNICATE /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")),
        ("an unknown route", get("/wp-admin.php")),
        (
            "an invalid UUID",
            raw(&format!(
                "DELETE /admin/v1/keys/1%27%20or%201=1 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\nconnection: close\r\n\r\n"
            )),
        ),
        ("NUL in the query", get("/admin/v1/keys?tenant=%00")),
        ("an unknown parameter", get("/admin/v1/keys?colour=red")),
        ("a limit out of range", get("/admin/v1/keys?limit=4294967296")),
        ("a forged cursor", get("/admin/v1/keys?cursor=AAAA")),
        ("NUL in a header", raw("GET /readyz HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n")),
        ("a header without a colon", raw("GET /readyz HTTP/1.1\r\nhost\r\n\r\n")),
        ("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec()),
        ("an enormous header", raw(&format!("GET /readyz HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(300_000)))),
        ("a thousand headers", raw(&format!("GET /readyz HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(1_000)))),
        ("an endless address", raw(&format!("GET /{} HTTP/1.1\r\n\r\n", "y".repeat(100_000)))),
        (
            "two lengths",
            raw("POST /admin/v1/keys HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello"),
        ),
        ("a negative length", raw("POST /admin/v1/keys HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n")),
        (
            "invalid chunks",
            raw(&format!(
                "POST /admin/v1/keys HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n"
            )),
        ),
        ("slow headers", raw("GET /readyz HTTP/1.1\r\nhost: x\r\nx-slow: ")),
        ("a slow body", post(100, br#"{"name":"#)),
        (
            "a malformed token",
            raw("GET /admin/v1/keys HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a.b.c\r\nconnection: close\r\n\r\n"),
        ),
        (
            "another authentication scheme",
            raw("GET /admin/v1/keys HTTP/1.1\r\nhost: x\r\nauthorization: Basic YTpi\r\nconnection: close\r\n\r\n"),
        ),
        (
            "two credentials",
            raw(
                "GET /admin/v1/keys HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\nconnection: close\r\n\r\n",
            ),
        ),
        (
            "an unknown key",
            raw(
                "GET /admin/v1/keys HTTP/1.1\r\nhost: x\r\nauthorization: Bearer pbx_unknown\r\nconnection: close\r\n\r\n",
            ),
        ),
    ]
}

/// Sends the bytes and returns the whole response.
pub(super) async fn exchange(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let (mut reading, mut writing) = stream.split();
    // The server may respond and stop reading before it has received the whole request.
    let sending = async {
        let _ = writing.write_all(request).await;
        std::future::pending::<()>().await
    };
    let mut answer = Vec::new();
    tokio::select! {
        () = sending => {}
        read = tokio::time::timeout(Duration::from_secs(20), reading.read_to_end(&mut answer)) => {
            // A reset after the response also ends it.
            let _ = read.expect("a response in time");
        }
    }
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_thousand_malicious_requests_get_problems_in_constant_memory() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let env = [
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_HEAD_TIMEOUT_MS", "500"),
        ("PILLARBOX_BODY_TIMEOUT_MS", "500"),
        ("PILLARBOX_POOL_MIN", "0"),
    ];
    let process = serve(&folder, &database, &env);
    let base = process.base_url().await;
    let address = base.trim_start_matches("http://");
    let kinds = malicious_requests();

    let mut rss_after_first = 0;
    let numbers: Vec<usize> = (0..REQUESTS).collect();
    for (round, numbers) in numbers.chunks(IN_FLIGHT).enumerate() {
        let exchanges = numbers.iter().map(async |number| {
            let (kind, request) = &kinds[number % kinds.len()];
            (*kind, exchange(address, request).await)
        });
        for (kind, answer) in futures_util::future::join_all(exchanges).await {
            assert!(answer.starts_with("HTTP/1.1 4"), "{kind}: {answer:?}");
            assert!(answer.contains("content-type: application/problem+json"), "{kind}: {answer:?}");
            let body = answer.split_once("\r\n\r\n").unwrap().1;
            let problem: serde_json::Value =
                serde_json::from_str(body).unwrap_or_else(|error| panic!("{kind}: {error}: {answer:?}"));
            assert!(problem["type"].as_str().unwrap().starts_with("urn:pillarbox:problem:"), "{kind}: {answer:?}");
        }
        // Every kind was sent twice by now, so buffers have reached their size.
        if round == 2 * kinds.len() / IN_FLIGHT + 1 {
            rss_after_first = process.rss_bytes();
        }
    }
    let grown = process.rss_bytes().saturating_sub(rss_after_first);
    assert!(grown < 16 * 1024 * 1024, "grew by {grown} bytes");
    assert_eq!(Client::new(&base).get("/readyz").await.status, 200);
    let keys = admin_of(&process).await.get("/admin/v1/keys").await;
    assert_eq!((keys.status, keys.json()["items"].as_array().unwrap().len()), (200, 0), "no request created a key");
}

/// Times that can be parsed, but not stored, added to or formatted.
#[tokio::test]
async fn times_outside_the_supported_range_are_refused() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let (admin, user) = (app.admin(), app.user(Uuid::now_v7(), None));
    for time in ["-9999-01-01T00:00:00Z", "%2B262142-12-31T23:59:59Z", "2027-01-01T00:00:60Z"] {
        let lists =
            ["/event/v1/events", "/hub/v1/events", "/hub/v1/dead-letters", "/admin/v1/log", "/admin/v1/dead-letters"];
        for (list, bound) in lists.iter().flat_map(|list| [(list, "from"), (list, "to")]) {
            let answer = admin.get(&format!("{list}?{bound}={time}")).await;
            answer.assert_problem(400, "malformed-query");
            assert!(answer.text.contains("from 1970 to 9999"), "{list} {bound}: {}", answer.text);
        }
        let time = time.replace("%2B", "+");
        let bodies = [
            ("/hub/v1/dead-letters/retry", json!({"to": time})),
            ("/admin/v1/dead-letters/retry", json!({"consumer": "joins.events", "from": time})),
            ("/admin/v1/replays", json!({"consumer": "joins.events", "from": time})),
            ("/admin/v1/replays", json!({"consumer": "joins.events", "from": "2026-01-01T00:00:00Z", "to": time})),
            ("/admin/v1/consumers/joins.events/reset", json!({"from": time})),
            ("/admin/v1/keys", json!({"name": "k", "role": "ingest", "expires_at": time})),
        ];
        for (path, body) in bodies {
            admin.post(path, body).await.assert_problem(422, "validation-failed");
        }
        let event = meetup_with(json!({"start_time": time, "end_time": "2028-01-01T00:00:00Z"}));
        user.post("/event/v1/events", event).await.assert_problem(422, "validation-failed");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_json_array_is_not_accepted_as_an_object() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let made = app.admin().post("/admin/v1/keys", json!(["n", "ingest", null, null])).await;
    made.assert_problem(422, "validation-failed");
    app.stop().await;
}

#[tokio::test]
async fn a_search_for_punctuation_is_not_a_server_error() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    for text in ["-".repeat(60), format!("{}a", "-".repeat(60)), "- ".repeat(60), "a -".repeat(50), "\"".repeat(99)] {
        let answer =
            app.anonymous().get(&format!("/event/v1/events?q={}", text.replace(' ', "+").replace('"', "%22"))).await;
        assert!([200, 400].contains(&answer.status), "{text}: {answer:?}");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_name_that_is_not_accepted_is_answered_with_the_field_and_the_accepted_names() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let admin = app.admin();
    let subscriber =
        |field: &str| json!({"name": "a", "url": "https://example.com", "event_types": ["*"], field: "king"});
    for (path, body, pointer, detail) in [
        ("/admin/v1/keys", json!({"name": "a", "role": "king"}), "/role", "must be ingest, manage or admin"),
        ("/admin/v1/keys", json!({"name": "a", "role": 5}), "/role", "must be a string"),
        ("/admin/v1/keys", json!({"name": "a"}), "/role", "is required"),
        ("/hub/v1/subscribers", subscriber("on_exhausted"), "/on_exhausted", "must be skip or block"),
        ("/hub/v1/subscribers", subscriber("format"), "/format", "must be raw, standard or cloudevents"),
        ("/hub/v1/subscribers", subscriber("signature"), "/signature", "must be v1 or v1a"),
        ("/hub/v1/subscribers", subscriber("timeout_ms"), "/timeout_ms", "must be a whole number"),
        ("/hub/v1/subscribers", subscriber("headers"), "/headers", "must be an object"),
        ("/hub/v1/subscribers", subscriber("is_active"), "/is_active", "must be true or false"),
    ] {
        let refused = admin.post(path, body.clone()).await;
        refused.assert_problem(422, "validation-failed");
        let error = refused.json()["errors"][0].clone();
        assert_eq!((error["pointer"].as_str(), error["detail"].as_str()), (Some(pointer), Some(detail)), "{body}");
    }
    for (path, detail) in [
        ("/hub/v1/dead-letters?reason=king", "reason: must be "),
        ("/hub/v1/dead-letters?subscriber_id=king", "subscriber_id: must be a UUID"),
        ("/hub/v1/subscribers?is_active=king", "is_active: must be true or false"),
        (
            "/hub/v1/subscribers?colour=red",
            "colour: does not exist; the accepted names are is_active, event_type, q, limit and cursor",
        ),
    ] {
        let refused = admin.get(path).await;
        refused.assert_problem(400, "malformed-query");
        let said = refused.json()["detail"].as_str().unwrap().to_owned();
        assert!(said.starts_with(detail) && !said.contains("expected"), "{path}: {said}");
    }
    app.stop().await;
}
