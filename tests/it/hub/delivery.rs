//! Delivery of webhooks, from the posted event to the request at the endpoint.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::json;
use server::migrations;
use testkit::{Receiver, Reply, TestApp, TestDatabase, eventually};

use crate::hub::fixture::{post, subscribe, wait_for_webhooks};
use crate::support::{DEADLINE, caller};

#[tokio::test]
async fn an_event_reaches_its_subscriber_unchanged_and_signed() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let receiver = Receiver::start().await;
    let manager = caller(&app, "manage", "acme").await;
    let made = subscribe(&manager, &receiver.url(), json!({"event_types": ["order.*"]})).await;
    let event_id = post(&manager, "order.paid", json!({"b": 1, "a": [1.0, "é"]}), Some("o-1")).await;
    post(&manager, "invoice.paid", json!({}), None).await;
    wait_for_webhooks(&receiver, 1).await;
    let received = &receiver.received()[0];
    assert_eq!(received.header("webhook-id"), event_id);
    assert_eq!(received.header("webhook-lane"), "o-1");
    assert_eq!(received.header("webhook-seq"), "1");
    assert_eq!(received.header("content-type"), "application/json");
    assert_eq!(
        received.body,
        r#"{"a":[1.0,"é"],"b":1}"#.as_bytes(),
        "the order of fields that serde_json writes into the request"
    );
    let secret = made["secret"].as_str().unwrap();
    let webhook = standardwebhooks::Webhook::new(secret).unwrap();
    webhook.verify(&received.body, &received.headers).unwrap();
    let outcome = async || {
        let event = manager.get(&format!("/hub/v1/events/{event_id}")).await.json();
        event["outcomes"][0].clone()
    };
    eventually("the outcome is delivered", DEADLINE, async || outcome().await["outcome"] == "delivered").await;
    assert_eq!(outcome().await["subscriber_id"], made["id"]);
    app.stop().await;
    assert_eq!(receiver.count(), 1, "only the matching event");
}

#[tokio::test]
async fn lanes_are_delivered_in_order_and_do_not_block_each_other() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    // The first attempt of every third event fails.
    let mut tried: HashMap<String, u32> = HashMap::new();
    let receiver = Receiver::with_reply(move |received| {
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
    wait_for_webhooks(&receiver, 80).await;
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
async fn the_position_reaches_the_last_message_when_nothing_follows() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let receiver = Receiver::start().await;
    subscribe(&manager, &receiver.url(), json!({})).await;
    for n in 1..=2 {
        post(&manager, "test.posted", json!({ "n": n }), None).await;
        wait_for_webhooks(&receiver, n).await;
    }
    let passed = "select coalesce(max(n), 0) from pillarbox_hub.position";
    eventually("the position is saved", Duration::from_secs(5), async || {
        match sqlx::query_scalar::<_, i64>(passed).fetch_one(database.pool()).await.unwrap() {
            2 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    app.stop().await;
}
