//! Which subscriber receives which event, and in which order.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::Receiver;

use crate::hub::fixture::{Fixture, post, subscribe, wait_for_outcome, wait_for_webhooks};
use crate::hub::recorder::RequestRecorder;
use crate::support::{DEADLINE, text};

#[tokio::test]
async fn event_types_and_filters_select_events_and_the_rest_is_reported() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::start().await;
    let to = |name: &str| format!("{}/{name}", receiver.url());
    let condition = |pointer: &str, op: &str, value: Value| json!({"pointer": pointer, "op": op, "value": value});
    let large = json!([condition("/amount", "gte", json!(100)), condition("/customer/vip", "eq", json!(true))]);
    for (name, types, filter) in [
        ("exact", json!(["order.paid"]), Value::Null),
        ("prefix", json!(["order.*"]), Value::Null),
        ("all", json!(["*"]), Value::Null),
        ("large", json!(["order.*"]), large),
        ("known", json!(["*"]), json!([condition("/country", "in", json!(["DE", "FR"]))])),
        ("without", json!(["*"]), json!([condition("/country", "exists", json!(false))])),
        ("starts", json!(["*"]), json!([condition("/country", "starts_with", json!("F"))])),
    ] {
        subscribe(manager, &to(name), json!({"name": name, "event_types": types, "filter": filter})).await;
    }
    let off = subscribe(manager, &to("off"), json!({"name": "off", "is_active": false})).await;
    let vip = |amount: u64| json!({"amount": amount, "customer": {"vip": true}});
    let cases = [
        ("order.paid", vip(100), vec!["exact", "prefix", "all", "large", "without"]),
        ("order.paid.late", vip(99), vec!["prefix", "all", "without"]),
        ("order", vip(200), vec!["all", "without"]),
        ("orders.paid", json!({"country": "FR"}), vec!["all", "known", "starts"]),
        ("order.paid", json!({"country": "US", "amount": 500}), vec!["exact", "prefix", "all"]),
        ("user.created", json!(["no object"]), vec!["all", "without"]),
    ];
    for (event_type, payload, expected) in cases {
        let before = receiver.count();
        let event_id = post(manager, event_type, payload, None).await;
        wait_for_outcome(manager, &event_id, &off, "inactive").await;
        wait_for_webhooks(&receiver, before + expected.len()).await;
        let mut got: Vec<String> =
            receiver.received()[before..].iter().map(|one| one.path.rsplit('/').next().unwrap().to_owned()).collect();
        got.sort();
        let mut expected: Vec<&str> = expected;
        expected.sort_unstable();
        assert_eq!(got, expected, "{event_type}");
        let shown = manager.get(&format!("/hub/v1/events/{event_id}")).await.json();
        for outcome in shown["outcomes"].as_array().unwrap() {
            let name = text(&outcome["name"]);
            match (name, expected.contains(&name)) {
                ("off", _) => assert_eq!(outcome["outcome"], "inactive"),
                (_, false) => assert_eq!(outcome["outcome"], "filtered", "{event_type}: {outcome}"),
                (_, true) => {}
            }
        }
    }
    fixture.app.stop().await;
}

/// The events of one lane have different ordering keys and are therefore in different shards of the log.
#[tokio::test(flavor = "multi_thread")]
async fn ordering_by_a_payload_field_follows_the_order_of_posting() {
    const LANES: usize = 5;
    const PER_LANE: usize = 60;
    let fixture = Fixture::start().await;
    let recorder = RequestRecorder::start(|_, _, n, times| {
        (if n % 20 == 0 && times == 0 { 503 } else { 200 }, Duration::from_millis(n % 3))
    })
    .await;
    let fields = json!({"ordering_key": "/lane", "retry_backoff_seconds": [1, 1]});
    subscribe(&fixture.manager, &recorder.url("pointer"), fields).await;
    // One client for each lane: it posts the next event after the previous one is accepted.
    let posting = (0..LANES).map(|lane| {
        let client = fixture.manager.clone();
        tokio::spawn(async move {
            for n in 1..=PER_LANE {
                let payload = json!({"lane": format!("lane-{lane}"), "n": n});
                let key = format!("key-{}", n % 7);
                post(&client, "test.numbered", payload, (n % 4 != 0).then_some(&key[..])).await;
            }
        })
    });
    for poster in posting.collect::<Vec<_>>() {
        poster.await.unwrap();
    }
    recorder.wait_until_accepted(LANES * PER_LANE, DEADLINE).await;
    let shards: i64 = sqlx::query_scalar("select count(distinct shard) from pillarbox.log")
        .fetch_one(fixture.database.pool())
        .await
        .unwrap();
    assert!(shards > 8, "the events are in {shards} shards");
    fixture.app.stop().await;
    assert_eq!(recorder.check_lane_order(), 0);
    // A message without a value at the pointer waits for no other message.
    assert_eq!(recorder.accepted_count(), LANES * PER_LANE);
}
