//! The catalogue of event types: payloads are checked everywhere, versions only add, and the file of a catalogue is complete.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Receiver, Response, TestApp, TestDatabase};

use crate::hub::fixture::{Fixture, error_pointers, post_in_sql, subscribe, subscriber_path, wait_for_fan_out};
use crate::support::{caller, collect_pages, text};

const ORDER: &str = "order.paid";

fn order_schema() -> Value {
    json!({
        "type": "object", "required": ["id"],
        "properties": {"id": {"type": "integer"}, "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}}},
        "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}}}},
    })
}

async fn add_type(manager: &Client, fields: Value) -> Value {
    let made = manager.post("/hub/v1/event-types", fields).await;
    assert_eq!(made.status, 201, "{made:?}");
    made.json()
}

async fn add_version(manager: &Client, name: &str, body: Value) -> Response {
    manager.post(&format!("/hub/v1/event-types/{name}/versions"), body).await
}

async fn change(manager: &Client, path: &str, body: Value) {
    let changed = manager.send(Method::PATCH, path, Some(body)).await;
    assert_eq!(changed.status, 200, "{changed:?}");
}

async fn post_event(producer: &Client, event_type: &str, payload: Value) -> Response {
    producer.post("/hub/v1/events", json!({"event_type": event_type, "payload": payload})).await
}

/// Posts in SQL, which no schema can make fail, and waits for the verdict. Returns the pointers to what is wrong with the event.
async fn verdict_in_sql(db: &PgPool, (manager, tenant): (&Client, &str), topic: &str, payload: &Value) -> Vec<String> {
    let id = post_in_sql(db, tenant, topic, payload).await;
    let event = wait_for_fan_out(manager, &id).await;
    let errors = event["rejection"]["errors"].as_array().cloned().unwrap_or_default();
    assert_eq!(event["outcome"] == "rejected", !errors.is_empty(), "{event}");
    errors.iter().map(|error| text(&error["pointer"]).to_owned()).collect()
}

#[tokio::test]
async fn payloads_are_checked_over_http_and_in_sql_with_pointers_to_what_is_wrong() {
    let fixture = Fixture::start().await;
    let (db, app) = (fixture.database.pool(), &fixture.app);
    let manager = &caller(app, "manage", "main").await;
    let (producer, other) = (caller(app, "ingest", "main").await, caller(app, "manage", "rival").await);
    add_type(manager, json!({"name": ORDER, "schema": order_schema(), "examples": [{"id": 1}]})).await;

    let wrong = json!({"id": 1, "lines": [{"sku": "AB-1"}, {"sku": "ab"}]});
    for payload in [json!({"id": 1.0}), json!({"id": 2, "lines": [{"sku": "AB-12"}], "other": null})] {
        assert_eq!(post_event(&producer, ORDER, payload.clone()).await.status, 202);
        assert_eq!(verdict_in_sql(db, (manager, "main"), ORDER, &payload).await, [""; 0]);
    }
    assert_eq!(error_pointers(&post_event(&producer, ORDER, wrong.clone()).await), ["/payload/lines/1/sku"]);
    assert_eq!(
        error_pointers(&producer.post("/events", json!({"event_type": ORDER, "payload": {}})).await),
        ["/payload"]
    );
    let batch =
        json!({"events": [{"event_type": ORDER, "payload": {"id": 1}}, {"event_type": ORDER, "payload": {"id": "1"}}]});
    assert_eq!(error_pointers(&producer.post("/hub/v1/events/batch", batch).await), ["/events/1/payload/id"]);
    assert_eq!(verdict_in_sql(db, (manager, "main"), ORDER, &wrong).await, ["/payload/lines/1/sku"]);
    let large = json!({"id": 1, "lines": vec![json!({"sku": "x".repeat(50)}); 2_000]});
    assert_eq!(error_pointers(&post_event(&producer, ORDER, large).await).len(), 20, "in a thread of its own");

    assert_eq!(post_event(&other, ORDER, json!({})).await.status, 202, "another tenant has no catalogue");
    assert_eq!(post_event(&producer, "order.sent", json!(5)).await.status, 202, "the type is not in the catalogue");
    change(manager, "/hub/v1/catalogue", json!({"unknown_types": "refuse"})).await;
    assert_eq!(error_pointers(&post_event(&producer, "order.sent", json!(5)).await), ["/event_type"]);
    assert_eq!(verdict_in_sql(db, (manager, "main"), "order.sent", &json!(5)).await, ["/event_type"]);
    let email = post_in_sql(db, "main", "email.code", &json!({})).await;
    manager.get(&format!("/hub/v1/events/{email}")).await.assert_problem(404, "event-not-found");
    change(manager, &format!("/hub/v1/event-types/{ORDER}"), json!({"enforce": false})).await;
    assert_eq!(post_event(&producer, ORDER, wrong.clone()).await.status, 202);
    assert_eq!(verdict_in_sql(db, (manager, "main"), ORDER, &wrong).await, [""; 0]);
    let deleted = manager.send(Method::DELETE, &format!("/hub/v1/event-types/{ORDER}"), None).await;
    assert_eq!(deleted.status, 204, "{deleted:?}");
    assert_eq!(error_pointers(&post_event(&producer, ORDER, json!({"id": 1})).await), ["/event_type"]);
    assert_eq!(verdict_in_sql(db, (manager, "main"), ORDER, &json!({"id": 1})).await, ["/event_type"]);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_version_that_breaks_is_refused_with_pointers_unless_it_is_forced() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let made = add_type(manager, json!({"name": ORDER, "schema": order_schema()})).await;
    assert_eq!((&made["version"], &made["enforce"]), (&json!(1), &json!(true)), "{made}");
    manager.post("/hub/v1/event-types", json!({"name": ORDER})).await.assert_problem(409, "event-type-exists");

    let mut breaking = order_schema();
    breaking["required"] = json!(["id", "total"]);
    breaking["properties"]["id"] = json!({"type": "string"});
    breaking["properties"].as_object_mut().unwrap().remove("lines");
    let refused = add_version(manager, ORDER, json!({"schema": breaking})).await;
    refused.assert_problem(409, "breaking-change");
    let mut pointers: Vec<String> =
        refused.json()["errors"].as_array().unwrap().iter().map(|error| text(&error["pointer"]).to_owned()).collect();
    pointers.sort();
    assert_eq!(pointers, ["/schema/properties/id/type", "/schema/properties/lines", "/schema/required"]);
    assert_eq!(post_event(manager, ORDER, json!({"id": "1", "total": 5})).await.status, 422, "nothing has changed");

    let mut added = order_schema();
    added["properties"]["note"] = json!({"type": "string"});
    let version = add_version(manager, ORDER, json!({"schema": added, "examples": [{"id": 1, "note": "x"}]})).await;
    assert_eq!((version.status, &version.json()["version"]), (201, &json!(2)), "{version:?}");
    assert_eq!(error_pointers(&post_event(manager, ORDER, json!({"id": 1, "note": 5})).await), ["/payload/note"]);
    let forced = add_version(manager, ORDER, json!({"schema": breaking, "force": true})).await;
    assert_eq!((forced.status, forced.json()["versions"].as_array().unwrap().len()), (201, 3), "{forced:?}");
    assert_eq!(post_event(manager, ORDER, json!({"id": "1", "total": 5})).await.status, 202);

    for (body, pointer) in [
        (json!({"schema": {"$ref": "https://example.com/x"}}), "/schema/$ref"),
        (json!({"schema": {"type": "text"}}), "/schema/type"),
        (json!({"schema": {"type": "object"}, "examples": [{}, 5]}), "/examples/1"),
        (json!({"schema": {"pattern": "(?=a)"}}), "/schema/pattern"),
    ] {
        assert_eq!(error_pointers(&add_version(manager, ORDER, body).await), [pointer]);
    }
    let reserved = manager.post("/hub/v1/event-types", json!({"name": "hub.mine"})).await;
    assert_eq!(error_pointers(&reserved), ["/name"]);
    let producer = caller(&fixture.app, "ingest", "acme").await;
    assert_eq!(producer.get(&format!("/hub/v1/event-types/{ORDER}")).await.json()["version"], 3, "producers may read");
    producer.post("/hub/v1/event-types", json!({"name": "a"})).await.assert_problem(403, "forbidden");
    let other = caller(&fixture.app, "manage", "rival").await;
    other.get(&format!("/hub/v1/event-types/{ORDER}")).await.assert_problem(404, "event-type-not-found");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_change_of_the_catalogue_is_effective_in_every_process_when_it_is_answered() {
    let database = TestDatabase::new(&migrations()).await;
    let (one, two) = (TestApp::start(&database).await, TestApp::start(&database).await);
    let (manager, producer) = (caller(&one, "manage", "acme").await, caller(&two, "ingest", "acme").await);
    assert_eq!(post_event(&producer, ORDER, json!({})).await.status, 202);
    add_type(&manager, json!({"name": ORDER, "schema": order_schema()})).await;
    for round in 0..6 {
        let is_enforced = round % 2 == 0;
        change(&manager, &format!("/hub/v1/event-types/{ORDER}"), json!({"enforce": is_enforced})).await;
        let expected = if is_enforced { 422 } else { 202 };
        for _ in 0..3 {
            assert_eq!(post_event(&producer, ORDER, json!({})).await.status, expected, "round {round}");
        }
    }
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_file_has_the_whole_catalogue_and_an_import_of_it_changes_nothing_else() {
    let fixture = Fixture::start().await;
    let (manager, copy) = (&fixture.manager, caller(&fixture.app, "manage", "other").await);
    add_type(manager, json!({"name": ORDER, "description": "Paid <b>", "deprecated": true, "schema": order_schema()}))
        .await;
    // Spaces, the order of fields and the form of numbers stay as they are.
    let raw = r#"{"name": "raw", "schema": {"type":  "object", "minProperties": 1.0, "allOf": []  , "$comment": "x"}, "examples": [{"b": 1.50, "a": 1}]}"#;
    let raw = raw.replace(r#""allOf": []  , "#, "");
    let made = manager.send_text(Method::POST, "/hub/v1/event-types", &raw).await;
    assert_eq!(made.status, 201, "{made:?}");
    add_version(manager, ORDER, json!({"schema": true})).await.assert_problem(409, "breaking-change");
    assert_eq!(add_version(manager, ORDER, json!({"schema": true, "force": true})).await.status, 201);
    let file = manager.get("/hub/v1/catalogue/file").await.text;
    assert!(file.contains(r#"{"type":  "object", "minProperties": 1.0, "$comment": "x"}"#), "{file}");

    let import = async |query: &str, file: &str| {
        copy.send_text(Method::PUT, &format!("/hub/v1/catalogue/file{query}"), file).await
    };
    import("", &file).await.assert_problem(409, "breaking-change");
    let dry = import("?dry_run=true&force=true", &file).await.json();
    assert_eq!((&dry["created"], &dry["dry_run"]), (&json!([ORDER, "raw"]), &json!(true)), "{dry}");
    assert_eq!(collect_pages(&copy, "/hub/v1/event-types").await, [Value::Null; 0], "a dry run changes nothing");
    let imported = import("?force=true", &file).await.json();
    assert_eq!(imported["forced"][0]["pointer"], "/event_types/0/versions/1/schema/properties/id", "{imported}");
    assert_eq!(copy.get("/hub/v1/catalogue/file").await.text, file, "byte for byte");
    let again = import("", &file).await.json();
    assert_eq!((&again["unchanged"], &again["created"]), (&json!(2), &json!([])), "{again}");
    assert_eq!(error_pointers(&post_event(&copy, "raw", json!({})).await), ["/payload"], "it is enforced");

    let part = json!({"event_types": [{"name": "raw", "versions": []}]}).to_string();
    assert_eq!(error_pointers(&import("", &part).await), ["/event_types/0/versions"]);
    let part = json!({"event_types": [{"name": "new.one"}]}).to_string();
    assert_eq!(import("", &part).await.json()["removed"], json!([]));
    assert_eq!(import("?remove_others=true", &part).await.json()["removed"], json!([ORDER, "raw"]));
    assert_eq!(collect_pages(&copy, "/hub/v1/event-types?limit=1").await.len(), 1);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_catalogue_is_served_as_a_page_and_as_schemas_and_test_sends_use_its_examples() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::start().await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"format": "standard"})).await;
    let fields =
        json!({"name": ORDER, "description": "<script>x</script>", "schema": order_schema(), "examples": [{"id": 17}]});
    add_type(manager, fields).await;
    add_type(manager, json!({"name": "order.empty"})).await;
    let page = manager.get("/hub/v1/catalogue/page").await;
    assert!(page.header("content-type").starts_with("text/html") && page.text.contains("&lt;script&gt;"), "{page:?}");
    assert!(page.header("content-security-policy").contains("default-src 'none'") && !page.text.contains("<script"));
    let schemas = manager.get("/hub/v1/catalogue/schemas").await.json();
    assert_eq!(schemas["$defs"][ORDER]["properties"]["lines"]["items"]["$ref"], "#/$defs/order.paid-line", "{schemas}");
    assert_eq!(schemas["$defs"]["order.empty"], json!(true));
    assert!(schemas["$defs"]["order.paid-line"].is_object());

    let path = format!("{}/test", subscriber_path(&subscriber));
    let sent = manager.post(&path, json!({"event_type": ORDER})).await;
    assert_eq!((sent.status, &sent.json()["delivered"]), (200, &json!(true)), "{sent:?}");
    let body = receiver.received()[0].json();
    assert_eq!((&body["type"], &body["data"]), (&json!(ORDER), &json!({"id": 17})), "{body}");
    assert_eq!(manager.send(Method::POST, &path, None).await.status, 200);
    assert_eq!(receiver.received()[1].json()["type"], "hub.test");
    for without in ["order.empty", "order.unknown"] {
        assert_eq!(error_pointers(&manager.post(&path, json!({"event_type": without})).await), ["/event_type"]);
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn tenants_without_a_catalogue_use_the_shared_one_of_main() {
    let fixture = Fixture::start().await;
    let (db, app) = (fixture.database.pool(), &fixture.app);
    let (main, acme) = (caller(app, "manage", "main").await, caller(app, "manage", "acme").await);
    let producer = caller(app, "ingest", "acme").await;
    add_type(&main, json!({"name": ORDER, "schema": order_schema(), "examples": [{"id": 1}]})).await;
    let wrong = json!({"id": "1"});
    assert_eq!(post_event(&producer, ORDER, wrong.clone()).await.status, 202, "it is not shared yet");
    assert_eq!(acme.get("/hub/v1/event-types").await.json()["items"], json!([]));

    change(&main, "/hub/v1/catalogue", json!({"shared": true, "unknown_types": "refuse"})).await;
    assert_eq!(error_pointers(&post_event(&producer, ORDER, wrong.clone()).await), ["/payload/id"]);
    assert_eq!(error_pointers(&post_event(&producer, "order.lost", json!({})).await), ["/event_type"]);
    assert_eq!(verdict_in_sql(db, (&acme, "acme"), ORDER, &wrong).await, ["/payload/id"]);
    assert_eq!(verdict_in_sql(db, (&acme, "acme"), "order.lost", &json!({})).await, ["/event_type"]);
    assert_eq!(verdict_in_sql(db, (&acme, "acme"), ORDER, &json!({"id": 1})).await, [""; 0]);
    assert_eq!(producer.get(&format!("/hub/v1/event-types/{ORDER}")).await.json()["name"], ORDER);
    let listed = collect_pages(&acme, "/hub/v1/event-types").await;
    assert_eq!(listed.iter().map(|one| text(&one["name"])).collect::<Vec<_>>(), [ORDER], "the shared ones");
    let shown = acme.get("/hub/v1/catalogue").await.json();
    assert_eq!(shown, json!({"tenant": "main", "unknown_types": "refuse", "shared": true, "types": 1}));
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&acme, &receiver.url(), json!({})).await;
    let tested = acme.post(&format!("{}/test", subscriber_path(&subscriber)), json!({"event_type": ORDER})).await;
    assert_eq!(tested.status, 200, "{tested:?}");

    // A catalogue of its own replaces the shared one, until it is empty again.
    add_type(&acme, json!({"name": "own.type"})).await;
    let own = collect_pages(&acme, "/hub/v1/event-types").await;
    assert_eq!(own.iter().map(|one| text(&one["name"])).collect::<Vec<_>>(), ["own.type"]);
    assert_eq!(acme.get("/hub/v1/catalogue").await.json()["tenant"], "acme");
    assert_eq!(post_event(&producer, ORDER, wrong.clone()).await.status, 202);
    let of_rival = caller(app, "ingest", "rival").await;
    assert_eq!(error_pointers(&post_event(&of_rival, ORDER, wrong.clone()).await), ["/payload/id"], "still shared");
    assert_eq!(verdict_in_sql(db, (&acme, "acme"), ORDER, &wrong).await, [""; 0]);
    assert_eq!(acme.delete("/hub/v1/event-types/own.type").await.status, 204);
    assert_eq!(error_pointers(&post_event(&producer, ORDER, wrong.clone()).await), ["/payload/id"]);
    assert_eq!(verdict_in_sql(db, (&acme, "acme"), ORDER, &wrong).await, ["/payload/id"]);

    // So do settings of its own.
    change(&acme, "/hub/v1/catalogue", json!({"unknown_types": "accept"})).await;
    assert_eq!(post_event(&producer, "order.lost", json!({})).await.status, 202);
    assert_eq!(verdict_in_sql(db, (&acme, "acme"), "order.lost", &json!({})).await, [""; 0]);

    let refused = acme.send(Method::PATCH, "/hub/v1/catalogue", Some(json!({"shared": true}))).await;
    assert_eq!(error_pointers(&refused), ["/shared"]);
    change(&main, "/hub/v1/catalogue", json!({"shared": false})).await;
    assert_eq!(post_event(&producer, ORDER, wrong.clone()).await.status, 202);
    assert_eq!(verdict_in_sql(db, (&acme, "acme"), ORDER, &wrong).await, [""; 0]);
    assert_eq!(post_event(&of_rival, ORDER, wrong).await.status, 202);
    fixture.app.stop().await;
}
