//! `/admin/v1/tenants` and `pillarbox tenants`: the conventions of every API.

use hyper::Method;
use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase};
use uuid::Uuid;

use crate::hub::fixture::{Fixture, error_pointers, wait_for_fan_out};
use crate::server::process::run;
use crate::support::{caller, collect_pages, text};

#[tokio::test]
async fn an_operator_creates_changes_and_lists_tenants() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let admin = app.admin();
    let new = json!({"name": "globex", "display_name": "Globex", "metadata": {"plan": "pro"}, "subscribers_max": 2,
        "payload_bytes_max": 100.0});
    let keyed = admin.with_header("idempotency-key", "one");
    let made = keyed.post("/admin/v1/tenants", new.clone()).await;
    assert_eq!((made.status, made.header("location")), (201, "/admin/v1/tenants/globex"), "{made:?}");
    let repeated = keyed.post("/admin/v1/tenants", new.clone()).await;
    assert_eq!((repeated.status, repeated.header("idempotent-replayed")), (201, "true"));
    admin.post("/admin/v1/tenants", new).await.assert_problem(409, "tenant-exists");
    let shown = admin.get("/admin/v1/tenants/globex").await;
    assert_eq!((shown.json(), shown.header("etag")), (made.json(), made.header("etag")));
    let unchanged = admin.with_header("if-none-match", shown.header("etag")).get("/admin/v1/tenants/globex").await;
    assert_eq!(unchanged.status, 304);

    let change = async |tag: &str, body| {
        admin.with_header("if-match", tag).send(Method::PATCH, "/admin/v1/tenants/globex", Some(body)).await
    };
    let changed = change(shown.header("etag"), json!({"subscribers_max": null, "events_per_second_max": 7})).await;
    let body = changed.json();
    assert_eq!(
        (changed.status, &body["events_per_second_max"], &body["version"]),
        (200, &json!(7), &json!(2)),
        "{body}"
    );
    assert!(body.get("subscribers_max").is_none() && body["metadata"] == json!({"plan": "pro"}), "{body}");
    change(shown.header("etag"), json!({})).await.assert_problem(412, "stale");

    let invalid = json!({"name": "hooli", "display_name": "", "metadata": {"a": "\u{1}"}, "subscribers_max": -1,
        "events_per_second_max": 0, "payload_bytes_max": 262_145});
    let pointers = error_pointers(&admin.post("/admin/v1/tenants", invalid).await);
    let expected = ["/display_name", "/metadata", "/subscribers_max", "/events_per_second_max", "/payload_bytes_max"];
    assert_eq!(pointers, expected);
    assert_eq!(error_pointers(&admin.post("/admin/v1/tenants", json!({"name": "No"})).await), ["/name"]);

    let names = async |path: &str| -> Vec<String> {
        collect_pages(&admin, path).await.iter().map(|tenant| text(&tenant["name"]).to_owned()).collect()
    };
    let all = ["acme", "globex", "main", "other", "rival", "slow", "zeta"];
    assert_eq!(names("/admin/v1/tenants?limit=2").await, all);
    assert_eq!(admin.send(Method::POST, "/admin/v1/tenants/globex/suspend", None).await.status, 200);
    assert_eq!(names("/admin/v1/tenants?suspended=true").await, ["globex"]);
    assert_eq!(names("/admin/v1/tenants?q=E&limit=1").await, ["acme", "globex", "other", "zeta"]);
    assert_eq!(names("/admin/v1/tenants?q=Globex+corp").await, [""; 0]);
    assert_eq!(names("/admin/v1/tenants?q=GLO&suspended=false").await, [""; 0]);
    assert_eq!(names("/admin/v1/tenants?suspended=false&limit=100").await.len(), all.len() - 1);
    for action in ["suspend", "resume"] {
        let refused = admin.send(Method::POST, &format!("/admin/v1/tenants/main/{action}"), None).await;
        refused.assert_problem(409, "tenant-main");
    }
    admin.delete("/admin/v1/tenants/main").await.assert_problem(409, "tenant-main");
    for stranger in
        [caller(&app, "manage", "main").await, caller(&app, "admin", "acme").await, app.user(Uuid::now_v7(), None)]
    {
        stranger.get("/admin/v1/tenants").await.assert_problem(403, "forbidden");
    }
    app.stop().await;
}

#[tokio::test]
async fn keys_and_posts_of_an_unknown_tenant_are_refused() {
    let Fixture { database, app, .. } = Fixture::start().await;
    let key = json!({"name": "test", "role": "ingest", "tenant": "acne"});
    let refused = app.admin().post("/admin/v1/keys", key).await;
    assert_eq!(error_pointers(&refused), ["/tenant"]);
    assert!(refused.text.contains("POST /admin/v1/tenants"), "{refused:?}");
    let post = "select pillarbox.post('order.paid', '{}', tenant => 'acne')";
    let refused = sqlx::query(post).execute(database.pool()).await.unwrap_err().to_string();
    assert!(refused.contains("tenant 'acne' does not exist"), "{refused}");
    let count = "select count(*) from pillarbox.tenant where name = 'acne'";
    assert_eq!(sqlx::query_scalar::<_, i64>(count).fetch_one(database.pool()).await.unwrap(), 0);

    app.admin().send(Method::PATCH, "/admin/v1/tenants/acme", Some(json!({"payload_bytes_max": 10}))).await;
    let post = "select pillarbox.post('order.paid', '\"0123456789\"', tenant => 'acme')";
    let id: Uuid = sqlx::query_scalar(post).fetch_one(database.pool()).await.unwrap();
    let rejected = wait_for_fan_out(&caller(&app, "manage", "acme").await, &id).await;
    assert_eq!(
        rejected["rejection"]["errors"][0]["detail"],
        "has 12 bytes, and the payloads of this tenant may have at most 10"
    );
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_managed_by_command() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let admin = app.admin();
    let tenants = |args: &[&str]| {
        let env = [("PILLARBOX_API_KEY", admin.credential())];
        run(&[&["tenants"], args, &["--server", admin.base()]].concat(), &env)
    };
    let (code, _, error) = tenants(&["create", "globex", "--display-name", "Globex", "--subscribers-max", "5"]);
    assert_eq!(code, Some(0), "{error}");
    let (code, _, error) = tenants(&["create", "globex"]);
    assert!(code == Some(1) && error.contains("exists already"), "{error}");
    let (code, _, error) = tenants(&["create", "hooli", "--payload-bytes-max", "0"]);
    assert!(code == Some(1) && error.contains("payload_bytes_max: must be a number from 1"), "{error}");
    let (_, shown, _) = tenants(&["show", "globex"]);
    assert!(shown.contains("\"subscribers_max\":5"), "{shown}");
    let (code, _, error) = tenants(&["delete", "globex"]);
    assert!(code == Some(1) && error.contains("suspend it first"), "{error}");
    let (_, suspended, _) = tenants(&["suspend", "globex"]);
    assert!(suspended.contains("is suspended"), "{suspended}");
    let (_, listed, _) = tenants(&["list", "--suspended", "true"]);
    assert!(listed.contains("globex") && listed.contains("Globex") && !listed.contains("acme"), "{listed}");
    let (_, resumed, _) = tenants(&["resume", "globex"]);
    assert!(resumed.contains("is resumed"), "{resumed}");
    let (_, listed, _) = tenants(&["list", "--json"]);
    assert_eq!(listed.lines().count(), 7, "{listed}");
    tenants(&["suspend", "globex"]);
    let (code, _, error) = tenants(&["delete", "globex"]);
    assert_eq!(code, Some(0), "{error}");
    let (code, _, error) = tenants(&["show", "globex"]);
    assert!(code == Some(1) && error.contains("there is no such tenant"), "{error}");
}
