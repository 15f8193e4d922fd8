//! Several messages of a subscriber in one request.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use standardwebhooks::Webhook;
use testkit::{Client, Receiver, Reply, eventually};

use crate::hub::fixture::{
    Fixture, attempts, error_pointers, numbered_events, patch_subscriber, post, post_batch, subscribe, subscriber_path,
    wait_for_outcome, wait_for_webhooks,
};
use crate::hub::replays::{hour_ago, is_delivered, request_replay, wait_for_replay};
use crate::support::{DEADLINE, text, uuid_of};

/// Creates a subscriber whose messages wait until it is resumed, so that they are ready together.
async fn subscribe_paused(manager: &Client, url: &str, fields: Value) -> Value {
    let subscriber = subscribe(manager, url, fields).await;
    set_paused(manager, &subscriber, "pause").await;
    subscriber
}

async fn set_paused(manager: &Client, subscriber: &Value, action: &str) {
    let changed = manager.post(&format!("{}/{action}", subscriber_path(subscriber)), json!({})).await;
    assert_eq!(changed.status, 200, "{changed:?}");
}

#[tokio::test]
async fn a_batch_is_one_signed_request_with_all_messages_in_order() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let mut made = Vec::new();
    for format in ["raw", "standard", "cloudevents"] {
        let receiver = Receiver::start().await;
        let fields = json!({"format": format, "batch": {"max": 100}});
        let subscriber = subscribe_paused(manager, &receiver.url(), fields).await;
        assert_eq!(subscriber["batch"], json!({"max": 100, "wait_ms": 0}));
        made.push((format, receiver, subscriber));
    }
    let mut ids = post_batch(manager, numbered_events(2, 1..=3)).await;
    ids.push(post(manager, "test.other", json!({"n": 4}), None).await);
    for (_, _, subscriber) in &made {
        for id in &ids {
            wait_for_outcome(manager, id, subscriber, "pending").await;
        }
        set_paused(manager, subscriber, "resume").await;
    }
    for (format, receiver, subscriber) in &made {
        wait_for_webhooks(receiver, 1).await;
        for id in &ids {
            let outcome = wait_for_outcome(manager, id, subscriber, "delivered").await;
            assert_eq!(attempts(manager, &outcome).await, [(Some(200), "delivered".to_owned())]);
        }
        assert_eq!(receiver.count(), 1, "{format}");
        let received = receiver.received().remove(0);
        Webhook::new(text(&subscriber["secret"])).unwrap().verify(&received.body, &received.headers).unwrap();
        assert_eq!(received.header("webhook-batch"), "7");
        assert!(received.header("webhook-id").starts_with("bat_"));
        let absent = ["webhook-event-type", "webhook-lane", "webhook-seq"].map(|name| received.headers.get(name));
        assert_eq!(absent, [None; 3], "they are not the same for all items");
        let (content_type, [time, lane, seq]) = match *format {
            "cloudevents" => ("application/cloudevents-batch+json", ["time", "partitionkey", "sequence"]),
            _ => ("application/json", ["timestamp", "lane", "seq"]),
        };
        assert_eq!(received.header("content-type"), content_type);
        let body = received.json();
        let items = body.as_array().unwrap();
        assert_eq!(items.iter().map(|item| text(&item["id"])).collect::<Vec<_>>(), ids, "as they were posted");
        assert_eq!(
            (&items[1]["data"], &items[1]["type"]),
            (&json!({"lane": "lane-1", "n": 1}), &json!("test.numbered"))
        );
        text(&items[1][time]).parse::<chrono::DateTime<chrono::Utc>>().unwrap();
        let position = (&items[3][lane], items[3][seq].to_string().replace('"', ""));
        assert_eq!(position, (&json!("lane-1"), "2".to_owned()));
        assert!(items[6].get(lane).is_none() && items[6]["data"] == json!({"n": 4}), "{body}");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_batch_that_fails_is_retried_whole_with_the_same_id() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let mut failures = 1;
    let receiver = Receiver::with_reply(move |_| match std::mem::take(&mut failures) {
        1 => Reply::status(503),
        _ => Reply::status(200),
    })
    .await;
    let fields =
        json!({"batch": {"max": 10, "wait_ms": 0}, "retry_backoff_seconds": [1], "rate_limit_per_second": 100});
    let subscriber = subscribe_paused(manager, &receiver.url(), fields).await;
    let ids = post_batch(manager, numbered_events(2, 1..=3)).await;
    for id in &ids {
        wait_for_outcome(manager, id, &subscriber, "pending").await;
    }
    set_paused(manager, &subscriber, "resume").await;
    for id in &ids {
        let outcome = wait_for_outcome(manager, id, &subscriber, "delivered").await;
        let tried = [(Some(503), "failed".to_owned()), (Some(200), "delivered".to_owned())];
        assert_eq!(attempts(manager, &outcome).await, tried, "each message has its attempts");
    }
    let received = receiver.received();
    let calls: Vec<(&str, &[u8])> = received.iter().map(|one| (one.header("webhook-id"), &one.body[..])).collect();
    assert_eq!(calls.len(), 2, "{calls:?}");
    assert_eq!(calls[0], calls[1], "the same messages in the same order");
    assert_eq!(received[0].header("webhook-event-type"), "test.numbered", "all have this type");

    // A test is a batch of one. Without `batch`, a webhook is the payload again.
    let tested = manager.post(&format!("{}/test", subscriber_path(&subscriber)), json!({})).await;
    assert_eq!(tested.json()["delivered"], true, "{tested:?}");
    let id = uuid_of(&subscriber["id"]);
    for (max, wait_ms, pointers) in [
        (0, 0, vec!["/batch/max"]),
        (101, 5_001, vec!["/batch/max", "/batch/wait_ms"]),
        (1, -1, vec!["/batch/wait_ms"]),
    ] {
        let refused = patch_subscriber(manager, id, json!({"batch": {"max": max, "wait_ms": wait_ms}})).await;
        assert_eq!(error_pointers(&refused), pointers);
    }
    let changed = patch_subscriber(manager, id, json!({"batch": null})).await;
    assert!(changed.status == 200 && changed.json().get("batch").is_none(), "{changed:?}");
    post(manager, "test.single", json!({"n": 9}), None).await;
    wait_for_webhooks(&receiver, 4).await;
    fixture.app.stop().await;
    let (test, single) = (&receiver.received()[2], &receiver.received()[3]);
    assert_eq!((test.header("webhook-batch"), &test.json()[0]["type"]), ("1", &json!("hub.test")));
    assert_eq!((single.headers.get("webhook-batch"), single.json()), (None, json!({"n": 9})));
}

/// The numbers of each lane in the batches of a replay, or in those without one.
fn numbers_by_lane(receiver: &Receiver, replay: Option<&str>) -> BTreeMap<String, Vec<u64>> {
    let mut lanes = BTreeMap::<String, Vec<u64>>::new();
    for batch in receiver.received() {
        let of = batch.headers.get("webhook-replay").map(|value| value.to_str().unwrap().to_owned());
        for item in batch.json().as_array().unwrap().iter().filter(|_| of.as_deref() == replay) {
            assert_eq!(item.get("seq").is_none(), replay.is_some(), "only live messages are numbered: {item}");
            lanes.entry(text(&item["lane"]).to_owned()).or_default().push(item["data"]["n"].as_u64().unwrap());
        }
    }
    lanes
}

#[tokio::test]
async fn batches_of_a_replay_and_of_live_messages_do_not_mix() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::start().await;
    subscribe(manager, &receiver.url(), json!({"batch": {"max": 20}})).await;
    post_batch(manager, numbered_events(4, 1..=100)).await;
    let delivered = |replay: Option<&str>| numbers_by_lane(&receiver, replay).values().map(Vec::len).sum::<usize>();
    eventually("live batches arrive", DEADLINE, async || delivered(None) == 400).await;
    let replays = [
        request_replay(manager, json!({"from": hour_ago()})).await,
        request_replay(manager, json!({"from": hour_ago()})).await,
    ];
    for n in 101..=120 {
        post_batch(manager, numbered_events(4, [n])).await;
    }
    for replay in &replays {
        let shown = wait_for_replay(manager, replay, "the replay is delivered", is_delivered).await;
        assert!(shown["created"].as_u64() >= Some(400), "{shown}");
        let lanes = numbers_by_lane(&receiver, replay["id"].as_str());
        let is_complete = |lane: &Vec<u64>| *lane == (1..=lane.len() as u64).collect::<Vec<_>>() && lane.len() >= 100;
        assert!(lanes.len() == 4 && lanes.values().all(is_complete), "{lanes:?}");
    }
    eventually("live batches arrive", DEADLINE, async || delivered(None) == 480).await;
    let live = numbers_by_lane(&receiver, None);
    assert!(live.values().all(|lane| *lane == (1..=120).collect::<Vec<_>>()), "{live:?}");
    assert!(receiver.count() < 300, "batches have several messages: {}", receiver.count());
    fixture.app.stop().await;
}
