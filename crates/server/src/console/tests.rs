//! The files of the console as clients get them: caching, compression and headers.

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use tower::ServiceExt;

use super::*;

const FILES: &[(&str, &[u8])] = &[
    ("assets/index-1a2b3c.js", b"console.log(1)"),
    ("assets/index-1a2b3c.js.gz", b"\x1f\x8b compressed script"),
    ("icon.svg", b"<svg/>"),
    ("index.html", b"<!doctype html>"),
    ("index.html.gz", b"\x1f\x8b compressed page"),
];

async fn get_with(
    settings: &ConsoleSettings,
    path: &str,
    headers: &[(&str, &str)],
) -> (StatusCode, HeaderMap, Vec<u8>) {
    let mut request = Request::builder().uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = routes_with(settings, FILES).oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    (parts.status, parts.headers, to_bytes(body, 1 << 20).await.unwrap().to_vec())
}

async fn get_file(path: &str, headers: &[(&str, &str)]) -> (StatusCode, HeaderMap, Vec<u8>) {
    get_with(&ConsoleSettings::default(), path, headers).await
}

#[tokio::test]
async fn hashed_files_are_cached_for_a_year_and_the_page_is_validated() {
    let (status, headers, body) = get_file("/console/assets/index-1a2b3c.js", &[]).await;
    assert_eq!((status, body.as_slice()), (StatusCode::OK, b"console.log(1)".as_slice()));
    assert_eq!(headers["cache-control"], "public, max-age=31536000, immutable");
    assert_eq!(headers["content-type"], "text/javascript; charset=utf-8");

    let (status, headers, body) = get_file("/console/", &[]).await;
    assert_eq!((status, body.as_slice()), (StatusCode::OK, b"<!doctype html>".as_slice()));
    assert_eq!(headers["cache-control"], "no-cache");
    assert_eq!(headers["content-type"], "text/html; charset=utf-8");
    let etag = headers["etag"].to_str().unwrap();
    let (status, headers, body) = get_file("/console/", &[("if-none-match", etag)]).await;
    assert_eq!((status, body.len()), (StatusCode::NOT_MODIFIED, 0));
    assert_eq!(headers["etag"], etag);
    let (status, ..) = get_file("/console/", &[("if-none-match", "\"other\"")]).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn the_compressed_copy_is_served_to_clients_that_accept_it() {
    for (accepted, is_compressed) in
        [("gzip", true), ("br, gzip;q=0.5", true), ("*", true), ("gzip;q=0", false), ("br", false), ("", false)]
    {
        let (_, headers, body) = get_file("/console/", &[("accept-encoding", accepted)]).await;
        assert_eq!(body.starts_with(b"\x1f\x8b"), is_compressed, "{accepted}");
        assert_eq!(headers.get("content-encoding").is_some(), is_compressed, "{accepted}");
        assert_eq!(headers["vary"], "accept-encoding");
    }
    // A cache must not confuse the two.
    let (_, plain, _) = get_file("/console/", &[]).await;
    let (_, compressed, _) = get_file("/console/", &[("accept-encoding", "gzip")]).await;
    assert_ne!(plain["etag"], compressed["etag"]);
    // A file without a copy, and a copy by its own name.
    let (status, headers, _) = get_file("/console/icon.svg", &[("accept-encoding", "gzip")]).await;
    assert_eq!(status, StatusCode::OK);
    assert!(headers.get("content-encoding").is_none());
    assert_eq!(get_file("/console/index.html.gz", &[]).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn every_response_has_the_policy_and_only_named_origins_may_frame_it() {
    let framed = ConsoleSettings {
        frame_ancestors: vec!["https://app.example.org".to_owned(), "http://localhost:3000".to_owned()],
        ..ConsoleSettings::default()
    };
    let paths = ["/console", "/console/", "/console/config.json", "/console/icon.svg", "/console/missing.js"];
    for path in paths {
        let (_, headers, _) = get_file(path, &[]).await;
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self';"), "{path}: {policy}");
        assert!(policy.ends_with("frame-ancestors 'none'"), "{path}: {policy}");
        assert_eq!(headers["x-content-type-options"], "nosniff", "{path}");
        assert_eq!(headers["referrer-policy"], "no-referrer", "{path}");
        let (_, headers, _) = get_with(&framed, path, &[]).await;
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(policy.ends_with("frame-ancestors https://app.example.org http://localhost:3000"), "{path}: {policy}");
    }
}
