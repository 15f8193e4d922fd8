//! Subscribers by HTTP: who sees what, what is refused and why, and what is never shown again.

use hub::signature::Verifier;
use hyper::Method;
use kit::auth::Role;
use serde_json::{Value, json};
use testkit::{Client, Receiver};
use uuid::Uuid;

use crate::hub_delivery::caller;
use crate::hub_people::{
    always, id_of, make_message, pointers, post_event, race, start, subscriber, subscriber_fields, walk,
};

async fn patch(client: &Client, id: Uuid, change: Value) -> testkit::Answer {
    client.send(Method::PATCH, &format!("/hub/v1/subscribers/{id}"), Some(change)).await
}

/// A body that each route with one takes.
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
async fn strangers_users_and_producers_are_kept_out_of_every_route_and_other_tenants_find_nothing() {
    let (database, app) = start().await;
    let (acme, rival) = (caller(&app, "manage", "acme").await, caller(&app, "admin", "rival").await);
    let (producer, user) = (caller(&app, "ingest", "acme").await, app.user(Uuid::now_v7(), None));
    let id = subscriber(&acme, "billing").await;
    let event = post_event(database.pool(), "acme", "order.paid", "{}").await;
    make_message(database.pool(), 1, id, event).await;
    let dead = crate::hub_people::bury(database.pool(), "acme", id, 2, (event, "order.paid"), "gone").await;
    let description = app.anyone().get("/openapi.json").await.json();
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
            send(&app.anyone()).await.assert_problem(401, "unauthorized");
            send(&user).await.assert_problem(403, "forbidden");
            send(&producer).await.assert_problem(403, "forbidden");
            let other = send(&rival).await;
            if path.contains("{id}") {
                assert_eq!(other.status, 404, "{method} {path}: {other:?}");
                hidden += 1;
            } else {
                assert!(!other.text.contains(&id.to_string()), "{method} {path}: {other:?}");
            }
        }
    }
    assert_eq!(hidden, 13);
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
    assert_eq!((version, commands), (1, 0), "nobody has changed anything");
    app.stop().await;
}

#[tokio::test]
async fn a_secret_and_header_values_are_shown_once_and_kept_sealed() {
    let (database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let mut fields = subscriber_fields("billing");
    fields["headers"] = json!({"Authorization": "Bearer hunter2-hunter2"});
    let made = acme.post("/hub/v1/subscribers", fields).await;
    assert_eq!(made.status, 201, "{made:?}");
    let (id, secret) = (id_of(&made.json()["id"]), made.json()["secret"].as_str().unwrap().to_owned());
    assert!(secret.starts_with("whsec_"), "{secret}");
    assert_eq!(made.header("location"), format!("/hub/v1/subscribers/{id}"));
    assert_eq!(made.header("etag"), "\"1\"");
    assert_eq!(made.json()["headers"], json!({"authorization": "***"}));
    let texts = [
        acme.get(&format!("/hub/v1/subscribers/{id}")).await.text,
        acme.get("/hub/v1/subscribers").await.text,
        patch(&acme, id, json!({"name": "other"})).await.text,
    ];
    let rows: Vec<String> = sqlx::query_scalar(
        "select s::text || encode(s.headers, 'escape') from pillarbox_hub.subscriber s
         union all select s::text || encode(s.sealed, 'escape') from pillarbox_hub.secret s",
    )
    .fetch_all(database.pool())
    .await
    .unwrap();
    assert_eq!(rows.len(), 2);
    for text in texts.iter().chain(&rows) {
        assert!(!text.contains(&secret[6..]) && !text.contains("hunter2"), "{text}");
    }
    let shown: Value = serde_json::from_str(&texts[0]).unwrap();
    assert_eq!(shown["headers"], json!({"authorization": "***"}));
    assert_eq!(shown["secrets"], json!([{"signature": "v1"}]));
    let shards: (i16, i16) =
        sqlx::query_as("select shard, pillarbox.shard_of('acme', id::text) from pillarbox_hub.subscriber")
            .fetch_one(database.pool())
            .await
            .unwrap();
    assert_eq!(shards.0, shards.1);
    app.stop().await;
}

#[tokio::test]
async fn a_repeat_of_making_one_makes_no_second_and_shows_no_secret() {
    let (_database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let repeating = acme.with_header("idempotency-key", "once");
    assert_eq!(repeating.post("/hub/v1/subscribers", subscriber_fields("a")).await.status, 201);
    repeating.post("/hub/v1/subscribers", subscriber_fields("a")).await.assert_problem(409, "already-answered");
    assert_eq!(walk(&acme, "/hub/v1/subscribers").await.len(), 1);
    app.stop().await;
}

#[tokio::test]
async fn every_field_that_is_wrong_is_named() {
    let (_database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let answer = acme.post("/hub/v1/subscribers", json!({})).await;
    assert_eq!(pointers(&answer), ["/name", "/url", "/event_types"]);
    let wrong = json!({
        "name": " ", "url": "ftp://example.com", "event_types": ["order.*", "order paid", ""],
        "filter": [{"pointer": "amount", "op": "gt", "value": 1}], "ordering_key": "id",
        "retry_backoff_seconds": [5, 0, 86_401], "retry_statuses": [409, 200], "timeout_ms": 99, "max_in_flight": 1_001,
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
        "/retry_statuses/1",
        "/timeout_ms",
        "/max_in_flight",
        "/rate_limit_per_second",
        "/headers/a~1b",
        "/headers/x",
        "/headers/a~1b",
        "/headers/webhook-id",
        "/secret",
    ];
    assert_eq!(pointers(&answer), expected);
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
        assert_eq!(pointers(&acme.post("/hub/v1/subscribers", fields.clone()).await), [pointer], "{fields}");
    }
    let mut unknown = subscriber_fields("a");
    unknown["colour"] = json!("red");
    acme.post("/hub/v1/subscribers", unknown).await.assert_problem(422, "validation-failed");
    let mut mixed = subscriber_fields("a");
    (mixed["secret"], mixed["signature"]) = (json!(format!("whsec_{}", "A".repeat(32))), json!("v1a"));
    assert_eq!(pointers(&acme.post("/hub/v1/subscribers", mixed).await), ["/signature"]);
    assert!(walk(&acme, "/hub/v1/subscribers").await.is_empty());
    app.stop().await;
}

#[tokio::test]
async fn a_change_keeps_what_is_absent_and_null_is_the_default() {
    let (_database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let all = json!({
        "name": "a", "url": "https://example.com/a", "event_types": ["order.paid"], "ordering_key": "/id",
        "filter": [{"pointer": "/amount", "op": "gt", "value": 1}], "retry_backoff_seconds": [], "retry_statuses": [409],
        "on_exhausted": "block", "timeout_ms": 100, "max_in_flight": 1, "rate_limit_per_second": 5,
        "headers": {"x-token": "one", "x-team": "blue"}, "format": "cloudevents", "is_active": false
    });
    let made = acme.post("/hub/v1/subscribers", all.clone()).await.json();
    let id = id_of(&made["id"]);
    let same = patch(&acme, id, json!({})).await;
    assert_eq!((same.status, same.header("etag")), (200, "\"1\""));
    for (field, value) in all.as_object().unwrap() {
        let expected = if field == "headers" { &json!({"x-team": "***", "x-token": "***"}) } else { value };
        assert_eq!(same.json()[field], *expected, "{field}");
    }
    let renamed = patch(&acme, id, json!({"name": "b", "headers": {"X-Token": "***", "x-team": "red"}})).await;
    assert_eq!((renamed.status, renamed.header("etag")), (200, "\"2\""));
    assert_eq!((&renamed.json()["name"], &renamed.json()["timeout_ms"]), (&json!("b"), &json!(100)));
    let nulls: Value = all
        .as_object()
        .unwrap()
        .keys()
        .filter(|field| !["name", "url", "event_types"].contains(&field.as_str()))
        .map(|field| (field.clone(), Value::Null))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let reset = patch(&acme, id, nulls).await.json();
    for (field, value) in [
        ("retry_backoff_seconds", json!([5, 30, 300])),
        ("retry_statuses", json!([])),
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
        pointers(&patch(&acme, id, json!({"name": null, "url": null, "secret": "x"})).await),
        ["/secret", "/name", "/url"]
    );
    app.stop().await;
}

#[tokio::test]
async fn who_changes_what_was_changed_meanwhile_is_told() {
    let (database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let id = subscriber(&acme, "a").await;
    let path = format!("/hub/v1/subscribers/{id}");
    let first = acme.with_header("if-match", "\"1\"");
    assert_eq!(patch(&first, id, json!({"name": "b"})).await.header("etag"), "\"2\"");
    patch(&first, id, json!({"name": "c"})).await.assert_problem(412, "stale");
    for action in ["pause", "resume"] {
        first.send(Method::POST, &format!("{path}/{action}"), None).await.assert_problem(412, "stale");
    }
    first.post(&format!("{path}/rotate-secret"), json!({})).await.assert_problem(412, "stale");
    first.delete(&path).await.assert_problem(412, "stale");
    acme.with_header("if-match", "1").delete(&path).await.assert_problem(400, "malformed-header");
    let known = acme.with_header("if-none-match", "\"2\"").get(&path).await;
    assert_eq!((known.status, known.text.as_str(), known.header("etag")), (304, "", "\"2\""));
    assert_eq!(first.with_header("if-none-match", "\"1\"").get(&path).await.json()["name"], "b");
    // Twenty that all start from the same version: one of them is in time.
    let second = acme.with_header("if-match", "\"2\"");
    let row = ("select from pillarbox_hub.subscriber where id = $1 for update", id);
    let racer = async move |number| patch(&second, id, json!({"name": format!("n{number}")})).await;
    let answers = race(database.pool(), row, racer).await;
    let (in_time, late): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 200);
    late.iter().for_each(|answer| answer.assert_problem(412, "stale"));
    assert_eq!(in_time.len(), 1);
    app.stop().await;
}

#[tokio::test]
async fn pausing_and_resuming_leave_being_active_alone() {
    let (database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let id = subscriber(&acme, "a").await;
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
    assert_eq!(walk(&acme, "/hub/v1/subscribers?is_active=true").await.len(), 0);
    let on = patch(&acme, id, json!({"is_active": true})).await.json();
    assert_eq!((&on["is_active"], &on["inactive_reason"]), (&json!(true), &Value::Null));
    assert_eq!(walk(&acme, "/hub/v1/subscribers?is_active=true").await.len(), 1);
    app.stop().await;
}

#[tokio::test]
async fn a_list_is_walked_newest_first_and_filtered_by_what_is_sent() {
    let (_database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let mut ids = Vec::new();
    for number in 0..7 {
        ids.push(subscriber(&acme, &format!("s{number}")).await);
    }
    let mut exact = subscriber_fields("exact");
    exact["event_types"] = json!(["order", "user.created"]);
    ids.push(id_of(&acme.post("/hub/v1/subscribers", exact).await.json()["id"]));
    ids.reverse();
    let seen: Vec<Uuid> =
        walk(&acme, "/hub/v1/subscribers?limit=3").await.iter().map(|one| id_of(&one["id"])).collect();
    assert_eq!(seen, ids);
    for (event_type, expected) in [
        ("order.paid", 7),
        ("order.item.added", 7),
        ("order", 1),
        ("order.", 0),
        ("orders.paid", 0),
        ("user.created", 1),
    ] {
        let found = walk(&acme, &format!("/hub/v1/subscribers?limit=5&event_type={event_type}")).await;
        assert_eq!(found.len(), expected, "{event_type}");
    }
    let cursor = acme.get("/hub/v1/subscribers?limit=3").await.json()["next_cursor"].as_str().unwrap().to_owned();
    let other =
        caller(&app, "manage", "rival").await.get(&format!("/hub/v1/subscribers?limit=3&cursor={cursor}")).await;
    other.assert_problem(400, "malformed-query");
    app.stop().await;
}

#[tokio::test]
async fn a_rotated_secret_overlaps_and_an_urgent_one_ends_all_others() {
    let (database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let mut fields = subscriber_fields("a");
    fields["signature"] = json!("v1a");
    let made = acme.post("/hub/v1/subscribers", fields).await.json();
    assert!(made["secret"].as_str().unwrap().starts_with("whsk_"));
    assert!(made["secrets"][0]["public_key"].as_str().unwrap().starts_with("whpk_"));
    let path = format!("/hub/v1/subscribers/{}/rotate-secret", made["id"].as_str().unwrap());
    let rotated = acme.post(&path, json!({})).await;
    assert_eq!((rotated.status, rotated.header("etag")), (200, "\"2\""));
    let rotated = rotated.json();
    assert!(rotated["secret"].as_str().unwrap().starts_with("whsk_") && rotated["secret"] != made["secret"]);
    let secrets = rotated["secrets"].as_array().unwrap();
    assert_eq!((secrets.len(), &secrets[0]["expires_at"]), (2, &Value::Null));
    let ends =
        |secret: &Value| secret["expires_at"].as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap();
    let left = ends(&secrets[1]) - chrono::Utc::now();
    assert!((23..=24).contains(&left.num_hours()), "{left}");
    for _ in 0..3 {
        assert_eq!(acme.post(&path, json!({"overlap_hours": 168})).await.status, 200);
    }
    acme.post(&path, json!({"overlap_hours": 1})).await.assert_problem(409, "too-many-secrets");
    let five = acme.get(path.trim_end_matches("/rotate-secret")).await.json();
    let secrets = five["secrets"].as_array().unwrap();
    assert_eq!(secrets.len(), 5);
    assert!((ends(&secrets[4]) - chrono::Utc::now()).num_hours() < 24, "a longer overlap lets none live longer");
    for hours in [-1, 169] {
        assert_eq!(pointers(&acme.post(&path, json!({"overlap_hours": hours})).await), ["/overlap_hours"]);
    }
    let urgent = acme.post(&path, json!({"overlap_hours": 0})).await.json();
    assert_eq!(urgent["secrets"].as_array().unwrap().len(), 1);
    let kept: i64 =
        sqlx::query_scalar("select count(*) from pillarbox_hub.secret").fetch_one(database.pool()).await.unwrap();
    assert_eq!(kept, 1);
    app.stop().await;
}

#[tokio::test]
async fn a_deleted_subscriber_takes_its_secrets_and_lanes_along() {
    let (database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let id = subscriber(&acme, "a").await;
    sqlx::query("insert into pillarbox_hub.lane (subscriber, head, attempts, again) values ($1, 1, 1, false)")
        .bind(id)
        .execute(database.pool())
        .await
        .unwrap();
    let path = format!("/hub/v1/subscribers/{id}");
    assert_eq!(acme.delete(&path).await.status, 204);
    acme.get(&path).await.assert_problem(404, "subscriber-not-found");
    acme.delete(&path).await.assert_problem(404, "subscriber-not-found");
    let left: i64 = sqlx::query_scalar(
        "select (select count(*) from pillarbox_hub.secret) + (select count(*) from pillarbox_hub.lane)",
    )
    .fetch_one(database.pool())
    .await
    .unwrap();
    assert_eq!(left, 0);
    app.stop().await;
}

#[tokio::test]
async fn a_test_is_signed_with_every_secret_and_says_what_came_of_it() {
    let (database, app) = start().await;
    let acme = caller(&app, "manage", "acme").await;
    let receiver = Receiver::replying(always(202, "thank you")).await;
    let mut fields = subscriber_fields("a");
    (fields["url"], fields["format"]) = (json!(receiver.url()), json!("standard"));
    fields["headers"] = json!({"x-token": "hunter2"});
    let made = acme.post("/hub/v1/subscribers", fields).await.json();
    let path = format!("/hub/v1/subscribers/{}", made["id"].as_str().unwrap());
    patch(&acme, id_of(&made["id"]), json!({"headers": {"X-Token": "***", "x-team": "blue"}})).await;
    let rotated = acme.post(&format!("{path}/rotate-secret"), json!({})).await.json();
    let tested = acme.send(Method::POST, &format!("{path}/test"), None).await;
    assert_eq!(tested.status, 200, "{tested:?}");
    let tested = tested.json();
    assert_eq!(
        (&tested["delivered"], &tested["status"], &tested["excerpt"]),
        (&json!(true), &json!(202), &json!("thank you"))
    );
    let received = receiver.received().pop().unwrap();
    assert_eq!(received.header("x-token"), "hunter2", "a value that is shown as *** is kept by giving that back");
    assert_eq!(received.header("x-team"), "blue");
    assert_eq!(received.header("webhook-id"), tested["event_id"].as_str().unwrap());
    for secret in [&made["secret"], &rotated["secret"]] {
        let verifier = Verifier::parse(secret.as_str().unwrap()).unwrap();
        verifier.verify(&received.headers, &received.body, chrono::Utc::now().timestamp()).unwrap();
    }
    let sent = received.json();
    assert_eq!((&sent["type"], &sent["data"]["subscriber_id"]), (&json!("hub.test"), &made["id"]));
    let logged: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.log").fetch_one(database.pool()).await.unwrap();
    assert_eq!(logged, 0, "a test does not go through the log");

    let broken = Receiver::replying(always(500, "no")).await;
    patch(&acme, id_of(&made["id"]), json!({"url": broken.url()})).await;
    let tested = acme.send(Method::POST, &format!("{path}/test"), None).await.json();
    assert_eq!((&tested["delivered"], &tested["status"]), (&json!(false), &json!(500)));
    patch(&acme, id_of(&made["id"]), json!({"url": "http://127.0.0.1:1/"})).await;
    let tested = acme.send(Method::POST, &format!("{path}/test"), None).await.json();
    assert_eq!((&tested["delivered"], &tested["error"]), (&json!(false), &json!("connect")));
    app.stop().await;
}
