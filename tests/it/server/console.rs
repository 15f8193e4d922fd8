//! The web console as a server serves it. The tests of the console itself are in `console/tests`.

use serde_json::json;
use server::migrations;
use service::Role;
use testkit::{TestApp, TestDatabase};

#[tokio::test]
async fn the_console_and_its_settings_are_served_without_credentials() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.console.name = "Acme events".to_owned();
        settings.console.colour = "#123abc".to_owned();
        settings.console.frame_ancestors = vec!["https://app.example.org".to_owned()];
    })
    .await;
    let client = app.anonymous();
    let redirect = client.get("/console").await;
    assert_eq!((redirect.status, redirect.header("location")), (308, "/console/"));
    let page = client.get("/console/").await;
    assert_eq!(page.status, 200, "{page:?}");
    assert!(page.text.starts_with("<!doctype html>"), "{page:?}");
    assert!(page.header("content-security-policy").ends_with("frame-ancestors https://app.example.org"), "{page:?}");
    assert_eq!(page.header("cache-control"), "no-cache");
    let config = client.get("/console/config.json").await;
    assert_eq!(config.json(), json!({"name": "Acme events", "colour": "#123abc"}));
    let missing = client.get("/console/assets/missing.js").await;
    missing.assert_problem(404, "unknown-route");
    assert!(missing.header("content-security-policy").starts_with("default-src 'none'"), "{missing:?}");
    client.post("/console/", json!({})).await.assert_problem(405, "method-not-allowed");
    let root = client.get("/").await;
    assert_eq!((root.status, root.header("location")), (307, "/console/"));
    app.stop().await;
}

#[tokio::test]
async fn a_server_without_console_or_without_the_role_api_has_no_page() {
    let database = TestDatabase::new(&migrations()).await;
    let disabled = TestApp::start_with(&database, |settings| settings.console.enabled = false).await;
    let without_role = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    for app in [disabled, without_role] {
        for path in ["/console", "/console/", "/console/config.json"] {
            app.anonymous().get(path).await.assert_problem(404, "unknown-route");
        }
        assert_eq!(app.anonymous().get("/").await.header("location"), "/docs/");
        app.stop().await;
    }
}
