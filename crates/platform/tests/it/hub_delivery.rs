//! Webhooks, from a post to what the endpoint sees.

use std::collections::HashMap;
use std::time::Duration;

use mailbox::database::migrations;
use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply, TestApp, TestDatabase, drain};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A caller of this tenant.
pub(crate) async fn caller(app: &TestApp, role: &str, tenant: &str) -> Client {
    let made = app.admin().post("/admin/v1/keys", json!({"name": "test", "role": role, "tenant": tenant})).await;
    assert_eq!(made.status, 201, "{made:?}");
    app.anyone().bearer(made.json()["key"].as_str().unwrap())
}

/// Makes a subscriber of everything, with these fields besides.
pub(crate) async fn subscribe(manager: &Client, url: &str, fields: Value) -> Value {
    let mut body = json!({"name": "test", "url": url, "event_types": ["*"]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let made = manager.post("/hub/v1/subscribers", body).await;
    assert_eq!(made.status, 201, "{made:?}");
    made.json()
}

pub(crate) async fn post(producer: &Client, event_type: &str, payload: Value, ordering_key: Option<&str>) -> String {
    let mut event = json!({"event_type": event_type, "payload": payload});
    if let Some(key) = ordering_key {
        event["ordering_key"] = key.into();
    }
    let posted = producer.post("/hub/v1/events", event).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    posted.json()["event_id"].as_str().unwrap().to_owned()
}

pub(crate) async fn until_received(receiver: &Receiver, count: usize) {
    drain(&format!("{count} webhooks have come"), PATIENCE, async || receiver.count() >= count).await;
}

#[tokio::test]
async fn an_event_reaches_who_asked_for_it_byte_for_byte_and_signed() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let receiver = Receiver::start().await;
    let manager = caller(&app, "manage", "acme").await;
    let made = subscribe(&manager, &receiver.url(), json!({"event_types": ["order.*"]})).await;
    let event_id = post(&manager, "order.paid", json!({"b": 1, "a": [1.0, "é"]}), Some("o-1")).await;
    post(&manager, "invoice.paid", json!({}), None).await;
    until_received(&receiver, 1).await;
    let received = &receiver.received()[0];
    assert_eq!(received.header("webhook-id"), event_id);
    assert_eq!(received.header("webhook-lane"), "o-1");
    assert_eq!(received.header("webhook-seq"), "1");
    assert_eq!(received.header("content-type"), "application/json");
    assert_eq!(received.body, r#"{"a":[1.0,"é"],"b":1}"#.as_bytes(), "serde_json's order of the request");
    let secret = made["secret"].as_str().unwrap();
    let webhook = standardwebhooks::Webhook::new(secret).unwrap();
    webhook.verify(&received.body, &received.headers).unwrap();
    let outcome = async || {
        let event = manager.get(&format!("/hub/v1/events/{event_id}")).await.json();
        event["outcomes"][0].clone()
    };
    drain("the outcome is known", PATIENCE, async || outcome().await["outcome"] == "delivered").await;
    assert_eq!(outcome().await["subscriber_id"], made["id"]);
    app.stop().await;
    assert_eq!(receiver.count(), 1, "nothing else");
}

#[tokio::test]
async fn each_lane_is_in_order_and_lanes_do_not_wait_for_each_other() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    // Every third fails once.
    let mut tried: HashMap<String, u32> = HashMap::new();
    let receiver = Receiver::replying(move |received| {
        let number = received.json()["n"].as_u64().unwrap();
        let tries = tried.entry(received.header("webhook-id").to_owned()).or_default();
        *tries += 1;
        Reply::status(if number % 3 == 0 && *tries == 1 { 503 } else { 200 })
    })
    .await;
    subscribe(&manager, &receiver.url(), json!({"retry_backoff_seconds": [1, 1]})).await;
    for number in 0..60 {
        post(&manager, "order.changed", json!({"n": number}), Some(&format!("o-{}", number % 7))).await;
    }
    until_received(&receiver, 80).await;
    app.stop().await;
    let mut last: HashMap<String, u64> = HashMap::new();
    let mut seqs: HashMap<String, u64> = HashMap::new();
    for received in receiver.received().iter().filter(|received| received.status == 200) {
        let (lane, number) = (received.header("webhook-lane").to_owned(), received.json()["n"].as_u64().unwrap());
        let before = last.insert(lane.clone(), number);
        assert!(before.is_none_or(|before| before < number), "{lane}: {number} after {before:?}");
        let seq = seqs.entry(lane).or_default();
        *seq += 1;
        assert_eq!(received.header("webhook-seq"), seq.to_string(), "no gap");
    }
    assert_eq!(seqs.values().sum::<u64>(), 60);
}

#[tokio::test]
async fn the_position_comes_to_the_last_message_also_when_nothing_follows() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let receiver = Receiver::start().await;
    subscribe(&manager, &receiver.url(), json!({})).await;
    for n in 1..=2 {
        post(&manager, "test.posted", json!({ "n": n }), None).await;
        until_received(&receiver, n).await;
    }
    let passed = "select coalesce(max(n), 0) from pillarbox_hub.position";
    drain("the position is kept", Duration::from_secs(5), async || {
        match sqlx::query_scalar::<_, i64>(passed).fetch_one(database.pool()).await.unwrap() {
            2 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    app.stop().await;
}
