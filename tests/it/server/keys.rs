//! API keys over HTTP: permissions, tenants, revocation and expiry.

use serde_json::json;
use server::migrations;
use testkit::{Client, TestApp, TestDatabase};

async fn key(app: &TestApp, role: &str, tenant: &str) -> Client {
    let made = app.admin().post("/admin/v1/keys", json!({"name": "test", "role": role, "tenant": tenant})).await;
    assert_eq!(made.status, 201, "{made:?}");
    app.anonymous().bearer(made.json()["key"].as_str().unwrap())
}

#[tokio::test]
async fn a_key_is_shown_once_and_stored_hashed() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let made = app.admin().post("/admin/v1/keys", json!({"name": "orders", "role": "ingest"})).await.json();
    let secret = made["key"].as_str().unwrap();
    assert!(secret.starts_with("pbx_") && secret.len() >= 28);
    let listed = app.admin().get("/admin/v1/keys").await;
    assert!(!listed.text.contains(secret) && listed.text.contains(made["hint"].as_str().unwrap()));
    let rows: Vec<String> =
        sqlx::query_scalar("select k::text from pillarbox_admin.api_key k").fetch_all(database.pool()).await.unwrap();
    assert!(rows.iter().all(|row| !row.contains(&secret[8..])));
    app.stop().await;
}

#[tokio::test]
async fn only_admins_manage_keys_and_only_those_of_their_tenant() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let body = json!({"name": "x", "role": "ingest"});
    for caller in
        [key(&app, "ingest", "acme").await, key(&app, "manage", "acme").await, app.user(uuid::Uuid::now_v7(), None)]
    {
        caller.get("/admin/v1/keys").await.assert_problem(403, "forbidden");
        caller.post("/admin/v1/keys", body.clone()).await.assert_problem(403, "forbidden");
        caller.delete(&format!("/admin/v1/keys/{}", uuid::Uuid::now_v7())).await.assert_problem(403, "forbidden");
    }
    let (acme, rival) = (key(&app, "admin", "acme").await, key(&app, "admin", "rival").await);
    let own = acme.post("/admin/v1/keys", body).await.json();
    assert_eq!(own["tenant"], "acme");
    let id = own["id"].as_str().unwrap();
    assert!(!rival.get("/admin/v1/keys").await.text.contains(id), "a tenant does not see the keys of another one");
    rival.get("/admin/v1/keys?tenant=acme").await.assert_problem(403, "forbidden");
    rival
        .post("/admin/v1/keys", json!({"name": "x", "role": "admin", "tenant": "main"}))
        .await
        .assert_problem(403, "forbidden");
    rival.delete(&format!("/admin/v1/keys/{id}")).await.assert_problem(404, "key-not-found");
    let still_good = app.anonymous().bearer(own["key"].as_str().unwrap()).get("/admin/v1/keys").await;
    still_good.assert_problem(403, "forbidden");
    assert_eq!(acme.delete(&format!("/admin/v1/keys/{id}")).await.status, 204);
    let revoked = app.anonymous().bearer(own["key"].as_str().unwrap()).get("/admin/v1/keys").await;
    revoked.assert_problem(401, "unauthorized");
    assert_eq!(acme.delete(&format!("/admin/v1/keys/{id}")).await.status, 204, "a repeated revocation succeeds");
    app.stop().await;
}

#[tokio::test]
async fn a_revoked_key_is_refused_by_every_replica_within_seconds() {
    let database = TestDatabase::new(&migrations()).await;
    let (one, two) = (TestApp::start(&database).await, TestApp::start(&database).await);
    let made = one.admin().post("/admin/v1/keys", json!({"name": "x", "role": "ingest"})).await.json();
    let secret = made["key"].as_str().unwrap();
    let on_two = two.anonymous().bearer(secret);
    on_two.get("/admin/v1/keys").await.assert_problem(403, "forbidden");
    one.admin().delete(&format!("/admin/v1/keys/{}", made["id"].as_str().unwrap())).await;
    let refused = async || on_two.get("/admin/v1/keys").await.status == 401;
    testkit::eventually("the other replica refuses the key", std::time::Duration::from_secs(4), refused).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn an_expired_key_is_refused() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let expires_at = chrono::Utc::now() + chrono::Duration::milliseconds(1500);
    let body = json!({"name": "short", "role": "admin", "expires_at": expires_at});
    let made = app.admin().post("/admin/v1/keys", body).await.json();
    let short = app.anonymous().bearer(made["key"].as_str().unwrap());
    assert_eq!(short.get("/admin/v1/keys").await.status, 200);
    let refused = async || short.get("/admin/v1/keys").await.status == 401;
    testkit::eventually("the key expires", std::time::Duration::from_secs(6), refused).await;
    let past = json!({"name": "x", "role": "admin", "expires_at": "2020-01-01T00:00:00Z"});
    let answer = app.admin().post("/admin/v1/keys", past).await;
    answer.assert_problem(422, "validation-failed");
    assert_eq!(answer.json()["errors"][0]["pointer"], "/expires_at");
    app.stop().await;
}

#[tokio::test]
async fn all_pages_together_contain_every_key_once() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    for number in 0..23 {
        app.admin().post("/admin/v1/keys", json!({"name": format!("k{number}"), "role": "ingest"})).await;
    }
    let (mut seen, mut path) = (Vec::new(), "/admin/v1/keys?limit=5&tenant=main".to_owned());
    loop {
        let answer = app.admin().get(&path).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        seen.extend(
            answer.json()["items"].as_array().unwrap().iter().map(|key| key["name"].as_str().unwrap().to_owned()),
        );
        let Some(cursor) = answer.json()["next_cursor"].as_str().map(str::to_owned) else { break };
        let link = answer.header("link").to_owned();
        assert!(link.contains(&cursor) && link.contains("limit=5") && link.contains("tenant=main"), "{link}");
        path = link.trim_start_matches('<').split_once('>').unwrap().0.to_owned();
        let other = app.admin().get(&format!("/admin/v1/keys?cursor={cursor}")).await;
        other.assert_problem(400, "malformed-query");
    }
    let expected: Vec<String> = (0..23).rev().map(|number| format!("k{number}")).collect();
    assert_eq!(seen, expected);
    app.stop().await;
}
