//! The HTTP API of subscribers: permissions, validation, changes, lists and deletion.

use http_kit::auth::Role;
use hyper::Method;
use serde_json::{Value, json};
use testkit::Client;
use uuid::Uuid;

use crate::hub::fixture::{error_pointers, patch_subscriber};
use crate::hub::rows::{
    create_subscriber, insert_dead_letter, insert_event, insert_message, race_for_row, start_api_only,
    subscriber_fields,
};
use crate::support::{caller, collect_pages, uuid_of};

/// A valid body for each route that accepts one.
fn body_of(path: &str, method: &Method) -> Option<Value> {
    match (path, method.as_str()) {
        ("/hub/v1/subscribers", "POST") => Some(subscriber_fields("x")),
        ("/hub/v1/subscribers/{id}", "PATCH") => Some(json!({"name": "y"})),
        ("/hub/v1/subscribers/{id}/rotate-secret", "POST") => Some(json!({})),
        ("/hub/v1/dead-letters/retry", "POST") => Some(json!({"all": true})),
        _ => None,
    }
}

#[tokio::test]
async fn only_managers_of_the_tenant_can_use_the_hub_routes() {
    let (database, app) = start_api_only().await;
    let (acme, rival) = (caller(&app, "manage", "acme").await, caller(&app, "admin", "rival").await);
    let (producer, user) = (caller(&app, "ingest", "acme").await, app.user(Uuid::now_v7(), None));
    let id = create_subscriber(&acme, "billing").await;
    let event = insert_event(database.pool(), "acme", "order.paid", "{}").await;
    insert_message(database.pool(), 1, id, event).await;
    let dead = insert_dead_letter(database.pool(), "acme", id, 2, (event, "order.paid"), "gone").await;
    let description = app.anonymous().get("/openapi.json").await.json();
    let mut hidden = 0;
    for (path, item) in description["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let method: Method = method.to_uppercase().parse().unwrap();
            let takes_events = path.contains("/events") && method == Method::POST;
            if operation["tags"] != json!(["hub"]) || takes_events {
                continue;
            }
            let name = match path.split('/').nth(3).unwrap() {
                "events" => event.id.to_string(),
                "messages" => format!("{}.{id}", event.id),
                "dead-letters" => dead.to_string(),
                _ => id.to_string(),
            };
            let address = path.replace("{id}", &name);
            let send = async |client: &Client| client.send(method.clone(), &address, body_of(path, &method)).await;
            send(&app.anonymous()).await.assert_problem(401, "unauthorized");
            send(&user).await.assert_problem(403, "forbidden");
            // A producer reads which payloads are accepted.
            let is_catalogue = path.starts_with("/hub/v1/catalogue") || path.starts_with("/hub/v1/event-types");
            if !(is_catalogue && method == Method::GET) {
                send(&producer).await.assert_problem(403, "forbidden");
            }
            let other = send(&rival).await;
            if path.contains("{id}") {
                assert_eq!(other.status, 404, "{method} {path}: {other:?}");
                hidden += 1;
            } else {
                assert!(!other.text.contains(&id.to_string()), "{method} {path}: {other:?}");
            }
        }
    }
    assert_eq!(hidden, 22);
    let messages = format!("/hub/v1/messages?subscriber_id={id}");
    rival.get(&messages).await.assert_problem(404, "subscriber-not-found");
    app.user(Uuid::now_v7(), Some(Role::Admin)).get(&messages).await.assert_problem(404, "subscriber-not-found");
    assert_eq!(acme.get(&messages).await.json()["items"].as_array().unwrap().len(), 1);
    let (version, commands): (i64, i64) = sqlx::query_as(
        "select (select version from pillarbox_hub.subscriber where id = $1),
                (select count(*) from pillarbox.log where source = 'hub.control')",
    )
    .bind(id)
    .fetch_one(database.pool())
    .await
    .unwrap();
    assert_eq!((version, commands), (1, 0), "no request changed anything");
    app.stop().await;
}

#[tokio::test]
async fn every_invalid_field_is_named() {
    let (_database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let answer = acme.post("/hub/v1/subscribers", json!({})).await;
    assert_eq!(error_pointers(&answer), ["/name", "/url", "/event_types"]);
    let wrong = json!({
        "name": " ", "url": "ftp://example.com", "event_types": ["order.*", "order paid", ""],
        "filter": [{"pointer": "amount", "op": "gt", "value": 1}], "ordering_key": "id",
        "retry_backoff_seconds": [5, 0, 86_401], "retry_rules": {"409": "retry", "200": "retry"}, "timeout_ms": 99, "max_in_flight": 1_001,
        "rate_limit_per_second": 0, "headers": {"webhook-id": "x", "a/b": "***", "x": "***"}, "secret": "whsec_short"
    });
    let answer = acme.post("/hub/v1/subscribers", wrong).await;
    let expected = [
        "/name",
        "/url",
        "/event_types/1",
        "/event_types/2",
        "/filter/0/pointer",
        "/ordering_key",
        "/retry_backoff_seconds/1",
        "/retry_backoff_seconds/2",
        "/retry_rules/200",
        "/timeout_ms",
        "/max_in_flight",
        "/rate_limit_per_second",
        "/headers/a~1b",
        "/headers/x",
        "/headers/a~1b",
        "/headers/webhook-id",
        "/secret",
    ];
    assert_eq!(error_pointers(&answer), expected);
    for (field, value, pointer) in [
        ("name", json!("x".repeat(101)), "/name"),
        ("name", json!("a\nb"), "/name"),
        ("name", Value::Null, "/name"),
        ("url", json!("https://10.0.0.1/"), "/url"),
        ("url", json!("http://169.254.169.254/latest/meta-data"), "/url"),
        ("url", json!("https://user:password@example.com/"), "/url"),
        ("event_types", json!([]), "/event_types"),
        ("event_types", json!(vec!["a"; 101]), "/event_types"),
        ("event_types", json!("order.*"), "/event_types"),
        ("filter", json!([{"pointer": "/a", "op": "near", "value": 1}]), "/filter/0/op"),
        ("filter", json!([{"pointer": "/a", "op": "eq", "value": "x".repeat(17_000)}]), "/filter"),
        ("retry_backoff_seconds", json!(vec![1; 21]), "/retry_backoff_seconds"),
        ("on_exhausted", json!("stop"), "/on_exhausted"),
        ("format", json!("xml"), "/format"),
        ("timeout_ms", json!(60_001), "/timeout_ms"),
        ("is_active", json!("yes"), "/is_active"),
        ("signature", json!("v2"), "/signature"),
        ("headers", json!({"x-a": "a\r\nhost: b"}), "/headers/x-a"),
    ] {
        let mut fields = subscriber_fields("a");
        fields[field] = value;
        assert_eq!(error_pointers(&acme.post("/hub/v1/subscribers", fields.clone()).await), [pointer], "{fields}");
    }
    let mut unknown = subscriber_fields("a");
    unknown["colour"] = json!("red");
    acme.post("/hub/v1/subscribers", unknown).await.assert_problem(422, "validation-failed");
    let mut mixed = subscriber_fields("a");
    (mixed["secret"], mixed["signature"]) = (json!(format!("whsec_{}", "A".repeat(32))), json!("v1a"));
    assert_eq!(error_pointers(&acme.post("/hub/v1/subscribers", mixed).await), ["/signature"]);
    assert!(collect_pages(&acme, "/hub/v1/subscribers").await.is_empty());
    app.stop().await;
}

#[tokio::test]
async fn a_patch_changes_present_fields_only_and_null_restores_defaults() {
    let (_database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let all = json!({
        "name": "a", "url": "https://example.com/a", "event_types": ["order.paid"], "ordering_key": "/id",
        "filter": [{"pointer": "/amount", "op": "gt", "value": 1}], "retry_backoff_seconds": [], "retry_rules": {"409": "retry"},
        "on_exhausted": "block", "timeout_ms": 100, "max_in_flight": 1, "rate_limit_per_second": 5,
        "headers": {"x-token": "one", "x-team": "blue"}, "format": "cloudevents", "is_active": false
    });
    let made = acme.post("/hub/v1/subscribers", all.clone()).await;
    let id = uuid_of(&made.json()["id"]);
    let same = patch_subscriber(&acme, id, json!({})).await;
    assert_eq!((same.status, same.header("etag")), (200, made.header("etag")), "nothing has changed");
    for (field, value) in all.as_object().unwrap() {
        let expected = if field == "headers" { &json!({"x-team": "***", "x-token": "***"}) } else { value };
        assert_eq!(same.json()[field], *expected, "{field}");
    }
    let renamed =
        patch_subscriber(&acme, id, json!({"name": "b", "headers": {"X-Token": "***", "x-team": "red"}})).await;
    assert_eq!((renamed.status, &renamed.json()["version"]), (200, &json!(2)));
    assert_ne!(renamed.header("etag"), same.header("etag"));
    assert_eq!((&renamed.json()["name"], &renamed.json()["timeout_ms"]), (&json!("b"), &json!(100)));
    let nulls: Value = all
        .as_object()
        .unwrap()
        .keys()
        .filter(|field| !["name", "url", "event_types"].contains(&field.as_str()))
        .map(|field| (field.clone(), Value::Null))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let reset = patch_subscriber(&acme, id, nulls).await.json();
    for (field, value) in [
        ("retry_backoff_seconds", json!([5, 30, 300])),
        ("retry_rules", json!({})),
        ("on_exhausted", json!("skip")),
        ("timeout_ms", json!(10_000)),
        ("max_in_flight", json!(50)),
        ("rate_limit_per_second", Value::Null),
        ("headers", json!({})),
        ("format", json!("raw")),
        ("is_active", json!(true)),
        ("filter", Value::Null),
        ("ordering_key", Value::Null),
        ("version", json!(3)),
    ] {
        assert_eq!(reset[field], value, "{field}");
    }
    assert_eq!(
        error_pointers(&patch_subscriber(&acme, id, json!({"name": null, "url": null, "secret": "x"})).await),
        ["/secret", "/name", "/url"]
    );
    app.stop().await;
}

#[tokio::test]
async fn a_change_based_on_an_old_version_is_rejected() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let id = create_subscriber(&acme, "a").await;
    let path = format!("/hub/v1/subscribers/{id}");
    let first_tag = acme.get(&path).await.header("etag").to_owned();
    let first = acme.with_header("if-match", &first_tag);
    let second_tag = patch_subscriber(&first, id, json!({"name": "b"})).await.header("etag").to_owned();
    patch_subscriber(&first, id, json!({"name": "c"})).await.assert_problem(412, "stale");
    for action in ["pause", "resume"] {
        first.send(Method::POST, &format!("{path}/{action}"), None).await.assert_problem(412, "stale");
    }
    first.post(&format!("{path}/rotate-secret"), json!({})).await.assert_problem(412, "stale");
    first.delete(&path).await.assert_problem(412, "stale");
    acme.with_header("if-match", "1").delete(&path).await.assert_problem(400, "malformed-header");
    let known = acme.with_header("if-none-match", &second_tag).get(&path).await;
    assert_eq!((known.status, known.text.as_str(), known.header("etag")), (304, "", second_tag.as_str()));
    assert_eq!(first.with_header("if-none-match", &first_tag).get(&path).await.json()["name"], "b");
    // Twenty changes based on the same version: exactly one succeeds.
    let second = acme.with_header("if-match", &second_tag);
    let row = ("select from pillarbox_hub.subscriber where id = $1 for update", id);
    let racer = async move |number| patch_subscriber(&second, id, json!({"name": format!("n{number}")})).await;
    let answers = race_for_row(database.pool(), row, racer).await;
    let (succeeded, rejected): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 200);
    rejected.iter().for_each(|answer| answer.assert_problem(412, "stale"));
    assert_eq!(succeeded.len(), 1);
    app.stop().await;
}

#[tokio::test]
async fn pause_and_resume_do_not_change_is_active() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let id = create_subscriber(&acme, "a").await;
    let act = async |action: &str| {
        let answer = acme.send(Method::POST, &format!("/hub/v1/subscribers/{id}/{action}"), None).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    };
    let paused = act("pause").await;
    assert!(paused["paused_at"].is_string());
    assert_eq!((&act("pause").await["paused_at"], &paused["version"]), (&paused["paused_at"], &json!(2)));
    sqlx::query("update pillarbox_hub.subscriber set is_active = false, inactive_reason = 'gone', version = 3")
        .execute(database.pool())
        .await
        .unwrap();
    let resumed = act("resume").await;
    assert_eq!(resumed["paused_at"], Value::Null);
    assert_eq!((&resumed["is_active"], &resumed["inactive_reason"]), (&json!(false), &json!("gone")));
    assert_eq!(collect_pages(&acme, "/hub/v1/subscribers?is_active=true").await.len(), 0);
    let on = patch_subscriber(&acme, id, json!({"is_active": true})).await.json();
    assert_eq!((&on["is_active"], &on["inactive_reason"]), (&json!(true), &Value::Null));
    assert_eq!(collect_pages(&acme, "/hub/v1/subscribers?is_active=true").await.len(), 1);
    app.stop().await;
}

#[tokio::test]
async fn the_list_is_paged_newest_first_and_filtered_by_event_type() {
    let (_database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let mut ids = Vec::new();
    for number in 0..7 {
        ids.push(create_subscriber(&acme, &format!("s{number}")).await);
    }
    let mut exact = subscriber_fields("exact");
    exact["event_types"] = json!(["order", "user.created"]);
    ids.push(uuid_of(&acme.post("/hub/v1/subscribers", exact).await.json()["id"]));
    ids.reverse();
    let seen: Vec<Uuid> =
        collect_pages(&acme, "/hub/v1/subscribers?limit=3").await.iter().map(|one| uuid_of(&one["id"])).collect();
    assert_eq!(seen, ids);
    for (event_type, expected) in [
        ("order.paid", 7),
        ("order.item.added", 7),
        ("order", 1),
        ("order.", 0),
        ("orders.paid", 0),
        ("user.created", 1),
    ] {
        let found = collect_pages(&acme, &format!("/hub/v1/subscribers?limit=5&event_type={event_type}")).await;
        assert_eq!(found.len(), expected, "{event_type}");
    }
    for (search, expected) in [("s", 7), ("S3", 1), ("XAC", 1), ("%25", 0), ("_", 0)] {
        let found = collect_pages(&acme, &format!("/hub/v1/subscribers?limit=2&q={search}")).await;
        assert_eq!(found.len(), expected, "{search}");
    }
    let cursor = acme.get("/hub/v1/subscribers?limit=3").await.json()["next_cursor"].as_str().unwrap().to_owned();
    let other =
        caller(&app, "manage", "rival").await.get(&format!("/hub/v1/subscribers?limit=3&cursor={cursor}")).await;
    other.assert_problem(400, "malformed-query");
    app.stop().await;
}

#[tokio::test]
async fn deleting_a_subscriber_deletes_its_secrets_and_lanes() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let id = create_subscriber(&acme, "a").await;
    sqlx::query("insert into pillarbox_hub.lane (subscriber, head, attempts, manual_retry) values ($1, 1, 1, false)")
        .bind(id)
        .execute(database.pool())
        .await
        .unwrap();
    let path = format!("/hub/v1/subscribers/{id}");
    assert_eq!(acme.delete(&path).await.status, 204);
    acme.get(&path).await.assert_problem(404, "subscriber-not-found");
    acme.delete(&path).await.assert_problem(404, "subscriber-not-found");
    let remaining: i64 = sqlx::query_scalar(
        "select (select count(*) from pillarbox_hub.secret) + (select count(*) from pillarbox_hub.lane)",
    )
    .fetch_one(database.pool())
    .await
    .unwrap();
    assert_eq!(remaining, 0);
    app.stop().await;
}
