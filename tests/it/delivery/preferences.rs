//! Preferences over HTTP: accepted values, versions, and the rules of event types.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, Response, TestApp, TestDatabase};
use uuid::Uuid;

use super::fixture::{insert_event, insert_in_app, set_event_type};
use crate::support::{caller, collect_pages, text};

const PATH: &str = "/notify/v1/preferences";

async fn put(client: &Client, body: Value) -> Response {
    client.send(Method::PUT, PATH, Some(body)).await
}

async fn patch(client: &Client, body: Value) -> Response {
    client.send(Method::PATCH, PATH, Some(body)).await
}

fn effective(shown: &Value, name: &str) -> (Value, Value) {
    let types = shown["event_types"].as_array().unwrap();
    let found = types.iter().find(|known| known["name"] == name).unwrap_or_else(|| panic!("{name}: {shown}"));
    (found["channels"].clone(), found["muted"].clone())
}

#[tokio::test]
async fn preferences_show_what_applies_to_each_type_and_change_by_version() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let (user, other) = (app.user(Uuid::now_v7(), None), app.user(Uuid::now_v7(), None));
    set_event_type(&app, "order.paid", json!({"channels": ["webhook", "email"], "digest_minutes": 15})).await;
    let shown = user.get(PATH).await;
    assert_eq!(shown.json()["preferences"], json!([]));
    assert_eq!(effective(&shown.json(), "order.paid"), (json!(["email", "webhook"]), json!([])));
    assert_eq!(effective(&shown.json(), "join.promoted"), (json!(["email", "in_app"]), json!([])));
    let current = user.with_header("if-none-match", shown.header("etag"));
    assert_eq!(current.get(PATH).await.status, 304);

    let quiet = json!({"time_zone": "Europe/Berlin", "from": "22:00", "until": "07:00"});
    let all = json!({"preferences": [{"channel": "email", "enabled": false},
        {"event_type": "order.paid", "enabled": true}, {"event_type": "my.own", "enabled": false}], "quiet_hours": quiet});
    let saved = put(&user.with_header("if-match", shown.header("etag")), all.clone()).await;
    assert_eq!(saved.status, 200, "{saved:?}");
    assert_eq!(
        (saved.json()["quiet_hours"].clone(), saved.json()["preferences"].as_array().unwrap().len()),
        (quiet, 3)
    );
    assert_eq!(effective(&saved.json(), "order.paid"), (json!(["email", "webhook"]), json!([])));
    assert_eq!(effective(&saved.json(), "join.promoted"), (json!(["in_app"]), json!(["email"])));
    assert_eq!(effective(&saved.json(), "my.own"), (json!([]), json!(["email", "in_app"])));
    put(&user.with_header("if-match", shown.header("etag")), all).await.assert_problem(412, "stale");
    assert_eq!(current.get(PATH).await.status, 200, "it has changed");

    let current = user.with_header("if-match", saved.header("etag"));
    let some = json!({"preferences": [{"channel": "email"},
        {"event_type": "join.promoted", "channel": "in_app", "enabled": false}]});
    let changed = patch(&current, some).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    assert_eq!(effective(&changed.json(), "join.promoted"), (json!(["email"]), json!(["in_app"])));
    assert_eq!(changed.json()["quiet_hours"]["from"], "22:00", "it stays");
    let changed = patch(&user, json!({"quiet_hours": null})).await;
    assert!(changed.json()["quiet_hours"].is_null() && changed.json()["preferences"].as_array().unwrap().len() == 3);
    assert_eq!(other.get(PATH).await.json()["preferences"], json!([]), "others have their own");
    app.admin().get(PATH).await.assert_problem(403, "forbidden");
    app.stop().await;
}

#[tokio::test]
async fn invalid_preferences_are_refused_with_the_field_and_critical_types_cannot_be_muted() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let user = app.user(Uuid::now_v7(), None);
    set_event_type(&app, "alarm.raised", json!({"critical": true})).await;
    let quiet =
        |zone: &str, from: &str, until: &str| json!({"quiet_hours": {"time_zone": zone, "from": from, "until": until}});
    for (body, pointer) in [
        (quiet("Europe/Atlantis", "22:00", "07:00"), "/quiet_hours/time_zone"),
        (quiet("Europe/Berlin", "24:00", "07:00"), "/quiet_hours/from"),
        (quiet("Europe/Berlin", "22:00", "7"), "/quiet_hours/until"),
        (quiet("Europe/Berlin", "22:00", "22:00"), "/quiet_hours/until"),
        (json!({"preferences": [{"event_type": "no type", "enabled": true}]}), "/preferences/0/event_type"),
    ] {
        let refused = patch(&user, body.clone()).await;
        assert_eq!((refused.status, refused.json()["errors"][0]["pointer"].clone()), (422, pointer.into()), "{body}");
    }
    let refused = patch(&user, json!({"preferences": [{"channel": "pigeon", "enabled": true}]})).await;
    assert!(refused.status == 422 && refused.text.contains("in_app"), "{refused:?}");
    assert_eq!(put(&user, json!({"preferences": [{"channel": "email"}]})).await.status, 422);

    let critical = json!({"preferences": [{"event_type": "alarm.raised", "channel": "email", "enabled": false}]});
    let muted = patch(&user, critical).await;
    muted.assert_problem(409, "event-type-critical");
    assert!(text(&muted.json()["detail"]).contains("alarm.raised"), "{muted:?}");
    let all = patch(&user, json!({"preferences": [{"enabled": true}, {"enabled": false}]})).await;
    assert_eq!(all.json()["preferences"], json!([{"enabled": false}]), "the last one counts");
    assert_eq!(effective(&all.json(), "alarm.raised"), (json!(["email", "in_app"]), json!([])));
    app.stop().await;
}

#[tokio::test]
async fn only_operators_set_the_rules_of_event_types_and_stale_changes_are_refused() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let (admin, path) = (app.admin(), "/notify/v1/event-types/order.paid");
    admin.get(path).await.assert_problem(404, "event-type-not-found");
    let made = admin.send(Method::PUT, path, Some(json!({"digest_minutes": 60}))).await;
    assert_eq!(
        (made.status, made.json()),
        (201, json!({"name": "order.paid", "critical": false, "digest_minutes": 60}))
    );
    let shown = admin.get(path).await;
    assert_eq!(shown.header("etag"), made.header("etag"));
    let changed =
        admin.send(Method::PUT, path, Some(json!({"critical": true, "channels": ["in_app", "in_app"]}))).await;
    assert_eq!((changed.status, changed.json()["channels"].clone()), (200, json!(["in_app"])));
    let stale = admin.with_header("if-match", made.header("etag"));
    stale.send(Method::PUT, path, Some(json!({}))).await.assert_problem(412, "stale");
    stale.delete(path).await.assert_problem(412, "stale");
    for body in [json!({"digest_minutes": 10_081}), json!({"digest_minutes": -1}), json!({"channels": ["fax"]})] {
        assert_eq!(admin.send(Method::PUT, path, Some(body)).await.status, 422);
    }
    // A critical event is never collected.
    let collected = json!({"critical": true, "digest_minutes": 60});
    let refused = admin.send(Method::PUT, path, Some(collected)).await;
    refused.assert_problem(422, "validation-failed");
    assert_eq!(refused.json()["errors"][0]["pointer"], "/digest_minutes", "{refused:?}");
    for at_once in [json!({"critical": true, "digest_minutes": 0}), json!({"critical": true, "digest_minutes": null})] {
        assert_eq!(admin.send(Method::PUT, path, Some(at_once)).await.status, 200);
    }
    let invalid = admin.send(Method::PUT, "/notify/v1/event-types/no-type", Some(json!({}))).await;
    invalid.assert_problem(400, "malformed-path");
    app.user(Uuid::now_v7(), None).get(path).await.assert_problem(403, "forbidden");
    assert_eq!(admin.delete(path).await.status, 204);
    admin.delete(path).await.assert_problem(404, "event-type-not-found");
    app.stop().await;
}

#[tokio::test]
async fn users_and_operators_list_the_event_types_that_they_know() {
    let database = TestDatabase::new(&migrations()).await;
    let (app, user) = (TestApp::start(&database).await, Uuid::now_v7());
    set_event_type(&app, "order.paid", json!({"channels": ["email"], "digest_minutes": 15})).await;
    set_event_type(&app, "alarm.raised", json!({"critical": true})).await;
    let mut db = database.pool().acquire().await.unwrap();
    insert_in_app(&mut db, user, "my.news", json!({})).await;
    insert_event(&mut db, "other.news", json!({})).await;
    let listed = async |client: &Client| collect_pages(client, "/notify/v1/event-types?limit=3").await;
    let of_user = listed(&app.user(user, None)).await;
    let names = |list: &[Value]| list.iter().map(|known| text(&known["name"]).to_owned()).collect::<Vec<_>>();
    assert!(names(&of_user).is_sorted() && of_user.len() == 9 + 3, "{of_user:?}");
    let known = |name: &str| of_user.iter().find(|known| known["name"] == name).cloned();
    let rules = |name: &str, critical: bool, channels: Value, minutes: u32, has_rules: bool| {
        Some(json!({"name": name, "critical": critical, "channels": channels, "digest_minutes": minutes,
                    "has_rules": has_rules}))
    };
    assert_eq!(known("order.paid"), rules("order.paid", false, json!(["email"]), 15, true));
    assert_eq!(known("alarm.raised"), rules("alarm.raised", true, json!(["email", "in_app"]), 0, true));
    assert_eq!(known("my.news"), rules("my.news", false, json!(["email", "in_app"]), 0, false), "it was received");
    assert_eq!(known("other.news"), None, "of others");
    let of_operator = names(&listed(&app.admin()).await);
    assert!(of_operator.contains(&"other.news".to_owned()) && of_operator.len() == 9 + 4, "{of_operator:?}");
    let preferences = app.user(user, None).get(PATH).await.json();
    assert_eq!(effective(&preferences, "my.news"), (json!(["email", "in_app"]), json!([])));
    caller(&app, "manage", "main").await.get("/notify/v1/event-types").await.assert_problem(403, "forbidden");
    app.stop().await;
}
