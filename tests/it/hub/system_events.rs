//! The events that the hub itself posts: about subscribers that it disables or that recover, and about dead letters.

use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Client, Receiver, Reply, eventually};

use crate::hub::fixture::{
    Fixture, error_pointers, patch_subscriber, post, subscribe, subscriber_path, wait_for_dead_letters,
    wait_for_outcome, wait_for_webhooks,
};
use crate::support::{DEADLINE, text, uuid_of};

/// A subscriber of the events of the hub, and what it receives.
async fn watch(manager: &Client) -> (Receiver, Value) {
    let receiver = Receiver::start().await;
    let fields = json!({"event_types": ["hub.*"], "format": "standard"});
    let subscriber = subscribe(manager, &receiver.url(), fields).await;
    (receiver, subscriber)
}

/// The types and payloads of the reports that a receiver has got about a subscriber.
fn reports_about(receiver: &Receiver, subscriber: &Value) -> Vec<(String, Value)> {
    let bodies = receiver.received().into_iter().map(|received| received.json());
    let about = bodies.filter(|body| body["data"]["subscriber_id"] == subscriber["id"]);
    about.map(|body| (text(&body["type"]).to_owned(), body["data"].clone())).collect()
}

async fn wait_for_reports(receiver: &Receiver, subscriber: &Value, types: &[&str]) -> Vec<Value> {
    let found = eventually(&format!("reports {types:?}"), DEADLINE, async || {
        let found = reports_about(receiver, subscriber);
        let has_all = types.iter().all(|wanted| found.iter().any(|(name, _)| name == wanted));
        if has_all { Ok(found) } else { Err(found) }
    })
    .await;
    let of_type = |wanted: &&str| found.iter().find(|(name, _)| name == wanted).unwrap().1.clone();
    types.iter().map(of_type).collect()
}

async fn posted_reports(db: &PgPool) -> Vec<(String, String)> {
    let query = "select topic, key from pillarbox.log where source = 'hub.system' order by topic, key";
    sqlx::query_as(query).fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn a_disabled_subscriber_is_reported_to_others_and_reports_make_no_loop() {
    let fixture = Fixture::start().await;
    let (db, manager) = (fixture.database.pool(), &fixture.manager);
    let all = Receiver::start().await;
    let of_all = subscribe(manager, &all.url(), json!({})).await;
    let gone = Receiver::with_reply(|_| Reply::status(410)).await;
    // All of them answer 410 to everything, also to the reports about each other.
    let subscriber = subscribe(manager, &gone.url(), json!({"event_types": ["order.*", "hub.*"]})).await;
    let mut watchers = Vec::new();
    for _ in 0..2 {
        watchers.push(subscribe(manager, &gone.url(), json!({"event_types": ["hub.*"]})).await);
    }
    post(manager, "order.paid", json!({"n": 1}), None).await;
    let disabled: Vec<&Value> = watchers.iter().chain([&subscriber]).collect();
    for disabled in &disabled {
        eventually("it is disabled", DEADLINE, async || {
            manager.get(&subscriber_path(disabled)).await.json()["is_active"] == json!(false)
        })
        .await;
    }
    // The effects of the reports come before this event.
    let last = post(manager, "order.sent", json!({"n": 2}), None).await;
    wait_for_outcome(manager, &last, &of_all, "delivered").await;
    let mut expected: Vec<(String, String)> = disabled
        .iter()
        .map(|disabled| ("hub.subscriber.disabled".to_owned(), text(&disabled["id"]).to_owned()))
        .chain([("hub.message.dead".to_owned(), text(&subscriber["id"]).to_owned())])
        .collect();
    expected.sort();
    assert_eq!(posted_reports(db).await, expected, "one per disabled subscriber, none about the messages of reports");
    assert_eq!(all.count(), 2, "`*` does not match the events of the hub");

    // A watcher that works gets them, and the event says who is active again.
    let (receiver, watcher) = watch(manager).await;
    let id = uuid_of(&subscriber["id"]);
    assert_eq!(patch_subscriber(manager, id, json!({"is_active": true})).await.status, 200);
    let recovered = wait_for_reports(&receiver, &subscriber, &["hub.subscriber.recovered"]).await.remove(0);
    assert_eq!(
        (&recovered["cause"], &recovered["subscriber_name"]),
        (&json!("enabled"), &json!("test")),
        "{recovered}"
    );
    post(manager, "order.paid", json!({"n": 3}), None).await;
    let types = ["hub.subscriber.disabled", "hub.message.dead"];
    let reports = wait_for_reports(&receiver, &subscriber, &types).await;
    assert_eq!((&reports[0]["reason"], &reports[0]["detail"]), (&json!("gone"), &json!("it answered 410 Gone")));
    assert_eq!(reports[1]["messages"][0]["event_type"], "order.paid", "{reports:?}");
    assert!(reports_about(&receiver, &watcher).is_empty());
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_report_about_a_subscriber_is_never_sent_to_that_subscriber() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (receiver, _) = watch(manager).await;
    let failing = Receiver::with_reply(|_| Reply::status(400)).await;
    let fields = json!({"event_types": ["order.*", "hub.*"], "format": "standard"});
    let subscriber = subscribe(manager, &failing.url(), fields).await;
    let event = post(manager, "order.paid", json!({}), Some("k")).await;
    let report = wait_for_reports(&receiver, &subscriber, &["hub.message.dead"]).await.remove(0);
    let message = &report["messages"][0];
    assert_eq!((&message["event_id"], &message["reason"]), (&json!(event), &json!("refused")), "{report}");
    assert_eq!((&message["ordering_key"], &message["attempts"]), (&json!("k"), &json!(1)), "{report}");
    // Another one, whose report comes after what the first report has led to.
    let other = Receiver::with_reply(|_| Reply::status(400)).await;
    let other = subscribe(manager, &other.url(), json!({"event_types": ["order.*"]})).await;
    post(manager, "order.sent", json!({}), None).await;
    wait_for_reports(&receiver, &other, &["hub.message.dead"]).await;
    wait_for_dead_letters(manager, &subscriber, 3).await;
    let types: Vec<Value> = failing.received().iter().map(|received| received.json()["type"].clone()).collect();
    let reports = types.iter().filter(|name| *name == "hub.message.dead").count();
    assert_eq!((types.len(), reports), (3, 1), "two orders, and the report about the other subscriber: {types:?}");
    assert_eq!(posted_reports(fixture.database.pool()).await.len(), 3, "none about the report that failed");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_breaker_that_closes_is_reported_and_many_dead_letters_are_few_reports() {
    let fixture = Fixture::start().await;
    let (db, manager) = (fixture.database.pool(), &fixture.manager);
    let (receiver, _) = watch(manager).await;
    let failing = Receiver::with_reply(|_| Reply::status(503)).await;
    let fields = json!({"event_types": ["order.*"], "retry_backoff_seconds": []});
    let subscriber = subscribe(manager, &failing.url(), fields).await;
    let event = json!({"event_type": "order.paid", "payload": {}});
    let posted = manager.post("/hub/v1/events/batch", json!({"events": vec![event; 60]})).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    wait_for_webhooks(&failing, 25).await;
    failing.set_reply(|_| Reply::status(200));
    let recovered = wait_for_reports(&receiver, &subscriber, &["hub.subscriber.recovered"]).await.remove(0);
    assert_eq!(recovered["cause"], "delivered", "{recovered}");
    assert!(text(&recovered["failing_since"]) < text(&recovered["recovered_at"]), "{recovered}");
    let dead: i64 = sqlx::query_scalar("select count(*) from pillarbox_hub.dead_letter").fetch_one(db).await.unwrap();
    let reported = eventually("every dead letter is reported", DEADLINE, async || {
        let reports = reports_about(&receiver, &subscriber);
        let of_dead = reports.iter().filter(|(name, _)| name == "hub.message.dead");
        let counts: Vec<usize> = of_dead.map(|(_, report)| report["messages"].as_array().unwrap().len()).collect();
        if counts.iter().sum::<usize>() == dead as usize { Ok(counts.len()) } else { Err(counts) }
    })
    .await;
    assert!(reported < dead as usize, "{reported} reports of {dead} dead letters");
    fixture.app.stop().await;
}

#[tokio::test]
async fn only_the_hub_posts_its_event_types() {
    let fixture = Fixture::start().await;
    let (db, manager) = (fixture.database.pool(), &fixture.manager);
    for reserved in ["hub", "hub.mine", "hub.message.dead"] {
        let refused = manager.post("/hub/v1/events", json!({"event_type": reserved, "payload": {}})).await;
        assert_eq!(error_pointers(&refused), ["/event_type"]);
        let query = "select pillarbox.post($1, '{}')";
        let error = sqlx::query(query).bind(reserved).execute(db).await.unwrap_err().to_string();
        assert!(error.contains("reserved"), "{error}");
    }
    sqlx::query("select pillarbox.post('hubs.mine', '{}')").execute(db).await.unwrap();
    assert_eq!(posted_reports(db).await, [], "nor was any of them posted");
    let (_, watcher) = watch(manager).await;
    subscribe(manager, "http://127.0.0.1:9/", json!({})).await;
    let found = manager.get("/hub/v1/subscribers?event_type=hub.message.dead").await.json();
    assert_eq!(found["items"].as_array().unwrap().len(), 1, "{found}");
    assert_eq!(found["items"][0]["id"], watcher["id"]);
    fixture.app.stop().await;
}
