//! Portal tokens: for one tenant, for the hub only, for reading or managing, and not for long.

use hyper::Method;
use serde_json::json;
use testkit::{Response, eventually};

use super::routes::{Resources, portal};
use crate::hub::fixture::{Fixture, error_pointers, subscribe};
use crate::server::api::{filled, operations};
use crate::support::{DEADLINE, caller, tables_with, text};

#[tokio::test(flavor = "multi_thread")]
async fn a_manage_token_changes_subscribers_but_posts_nothing_and_creates_no_credentials() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let resources = Resources::create(&manager).await;
    let editor = portal(&app, &manager, "manage").await;
    let made = subscribe(&editor, "https://example.com/hook", json!({})).await;
    assert_eq!(manager.get(&format!("/hub/v1/subscribers/{}", text(&made["id"]))).await.status, 200);
    let retry = resources.path("/hub/v1/dead-letters/{id}/retry");
    let retried = editor.send(Method::POST, &retry, None).await;
    assert!((200..300).contains(&retried.status), "{retried:?}");
    let event = json!({"event_type": "order.paid", "payload": {}});
    let refused: Vec<Response> = vec![
        editor.post("/hub/v1/events", event.clone()).await,
        editor.post("/events", event.clone()).await,
        editor.post("/hub/v1/events/batch", json!({"events": [event]})).await,
        editor.post("/hub/v1/portal-tokens", json!({"access": "read"})).await,
        editor.get("/hub/v1/portal-tokens").await,
        editor.post("/hub/v1/event-types", json!({"name": "own.type"})).await,
        editor.send(Method::PATCH, "/hub/v1/catalogue", Some(json!({"unknown_types": "refuse"}))).await,
        editor.post("/admin/v1/keys", json!({"name": "x", "role": "ingest"})).await,
        editor.with_header("pillarbox-tenant", "rival").get("/hub/v1/subscribers").await,
    ];
    refused.iter().for_each(|answer| answer.assert_problem(403, "forbidden"));
    // No route of another service, also none that is public.
    let mut others = 0;
    for (method, path, operation) in operations(&app.anonymous()).await {
        if path == "/events" || path.starts_with("/hub/v1/") || operation["security"].is_null() {
            continue;
        }
        others += 1;
        editor.send(method, &filled(&path), Some(json!({}))).await.assert_problem(403, "forbidden");
    }
    assert!(others > 50, "{others}");
    app.stop().await;
}

#[tokio::test]
async fn a_portal_token_expires_can_be_revoked_and_is_stored_hashed() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let new = json!({"access": "read", "expires_in_seconds": 600, "name": "support"});
    let keyed = manager.with_header("idempotency-key", "one");
    let made = keyed.post("/hub/v1/portal-tokens", new.clone()).await.json();
    let token = text(&made["token"]);
    assert!(token.starts_with("pbxp_") && token.len() == 45, "{token}");
    assert_eq!((&made["tenant"], &made["access"], &made["name"]), (&json!("acme"), &json!("read"), &json!("support")));
    assert_eq!(tables_with(database.pool(), token).await, [""; 0]);
    let again = keyed.post("/hub/v1/portal-tokens", new).await;
    again.assert_problem(409, "already-answered");
    for seconds in [0, 86_401] {
        let body = json!({"access": "read", "expires_in_seconds": seconds});
        assert_eq!(error_pointers(&manager.post("/hub/v1/portal-tokens", body).await), ["/expires_in_seconds"]);
    }
    assert_eq!(error_pointers(&manager.post("/hub/v1/portal-tokens", json!({"access": "all"})).await), ["/access"]);

    let portal = app.anonymous().bearer(token);
    assert_eq!(portal.get("/hub/v1/subscribers").await.status, 200);
    let listed = manager.get("/hub/v1/portal-tokens").await;
    assert!(listed.json()["items"][0]["id"] == made["id"] && !listed.text.contains("pbxp_"), "{listed:?}");
    let path = format!("/hub/v1/portal-tokens/{}", text(&made["id"]));
    caller(&app, "manage", "rival").await.delete(&path).await.assert_problem(404, "portal-token-not-found");
    assert_eq!(manager.delete(&path).await.status, 204);
    portal.get("/hub/v1/subscribers").await.assert_problem(401, "unauthorized");
    manager.delete(&path).await.assert_problem(404, "portal-token-not-found");

    let acting = app.admin().with_header("pillarbox-tenant", "acme");
    let short = acting.post("/hub/v1/portal-tokens", json!({"access": "read", "expires_in_seconds": 1})).await.json();
    assert_eq!(short["tenant"], "acme");
    let portal = app.anonymous().bearer(text(&short["token"]));
    eventually("the token expires", DEADLINE, async || portal.get("/hub/v1/subscribers").await.status == 401).await;
    assert_eq!(manager.get("/hub/v1/portal-tokens").await.json()["items"], json!([]));
    caller(&app, "ingest", "acme").await.get("/hub/v1/portal-tokens").await.assert_problem(403, "forbidden");
    app.stop().await;
}
