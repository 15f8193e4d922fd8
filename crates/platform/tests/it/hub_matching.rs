//! Who gets what, in which order and in which form.

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use testkit::{Received, Receiver};

use crate::hub_delivery::{PATIENCE, post, subscribe, until_received};
use crate::hub_world::{Notebook, World, text, until_outcome};

#[tokio::test]
async fn types_and_filters_choose_and_what_is_left_out_is_seen() {
    let world = World::start().await;
    let manager = &world.manager;
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
        until_outcome(manager, &event_id, &off, "inactive").await;
        until_received(&receiver, before + expected.len()).await;
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
    world.app.stop().await;
}

/// Its own events keep to one lane, though their keys, and so their places in the log, differ.
#[tokio::test(flavor = "multi_thread")]
async fn order_by_a_place_in_the_payload_is_the_order_of_posting_whatever_the_keys_were() {
    const LANES: usize = 5;
    const PER_LANE: usize = 60;
    let world = World::start().await;
    let notebook = Notebook::start(|_, _, n, times| {
        (if n % 20 == 0 && times == 0 { 503 } else { 200 }, Duration::from_millis(n % 3))
    })
    .await;
    let fields = json!({"ordering_key": "/lane", "retry_backoff_seconds": [1, 1]});
    subscribe(&world.manager, &notebook.url("pointer"), fields).await;
    // One caller for each lane: the next is posted when the one before is accepted.
    let posting = (0..LANES).map(|lane| {
        let client = world.manager.clone();
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
    notebook.until_taken(LANES * PER_LANE, PATIENCE).await;
    let shards: i64 = sqlx::query_scalar("select count(distinct shard) from pillarbox.log")
        .fetch_one(world.database.pool())
        .await
        .unwrap();
    assert!(shards > 8, "they stand in {shards} shards");
    world.app.stop().await;
    assert_eq!(notebook.check_order(), 0);
    // Without a value there, a message waits for no other.
    assert_eq!(notebook.taken(), LANES * PER_LANE);
}

#[tokio::test]
async fn each_format_has_its_body_and_headers_of_ones_own_are_sent_along() {
    let world = World::start().await;
    let manager = &world.manager;
    let mut made = Vec::new();
    for format in ["raw", "standard", "cloudevents"] {
        let receiver = Receiver::start().await;
        let fields = json!({"format": format, "headers": {"authorization": "Bearer hush", "x-team": "blue"}});
        let subscriber = subscribe(manager, &receiver.url(), fields).await;
        made.push((format, receiver, subscriber));
    }
    // Text that a JSON library would write otherwise.
    let body = r#"{"event_type":"order.paid","payload":{ "z": 1.50, "a":"\u00fc",  "z":2 },"ordering_key":"k 1"}"#;
    let payload = r#"{ "z": 1.50, "a":"\u00fc",  "z":2 }"#;
    let event_id = post_text(manager, body).await;
    for (format, receiver, subscriber) in &made {
        until_received(receiver, 1).await;
        let received: Received = receiver.received().remove(0);
        let sent = std::str::from_utf8(&received.body).unwrap();
        let json: Value = serde_json::from_str(sent).unwrap();
        let content_type = match *format {
            "raw" => {
                assert_eq!(sent, payload);
                "application/json"
            }
            "standard" => {
                assert_eq!(json["type"], "order.paid");
                "application/json"
            }
            _ => {
                assert_eq!((&json["specversion"], &json["type"]), (&json!("1.0"), &json!("order.paid")));
                assert_eq!((&json["id"], &json["datacontenttype"]), (&json!(event_id), &json!("application/json")));
                assert!(json["source"].is_string());
                "application/cloudevents+json"
            }
        };
        if *format != "raw" {
            assert!(sent.contains(&format!(r#""data":{payload}"#)), "byte for byte: {sent}");
            let time = text(&json[if *format == "standard" { "timestamp" } else { "time" }]);
            time.parse::<chrono::DateTime<chrono::Utc>>().unwrap();
        }
        assert_eq!(received.header("content-type"), content_type);
        assert_eq!((received.header("authorization"), received.header("x-team")), ("Bearer hush", "blue"));
        assert_eq!((received.header("webhook-id"), received.header("webhook-lane")), (&event_id[..], "k%201"));
        Webhook::new(text(&subscriber["secret"])).unwrap().verify(&received.body, &received.headers).unwrap();
    }
    world.app.stop().await;
}

async fn post_text(manager: &testkit::Client, body: &str) -> String {
    let posted = manager.send_text(Method::POST, "/hub/v1/events", body).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    text(&posted.json()["event_id"]).to_owned()
}

#[tokio::test]
async fn both_secrets_verify_while_they_overlap_and_the_new_one_alone_afterwards() {
    let world = World::start().await;
    let (manager, db) = (&world.manager, world.database.pool());
    let receiver = Receiver::start().await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let old = Webhook::new(text(&subscriber["secret"])).unwrap();
    let rotate = async |hours: u64| {
        let path = format!("/hub/v1/subscribers/{}/rotate-secret", text(&subscriber["id"]));
        let rotated = manager.post(&path, json!({"overlap_hours": hours})).await;
        assert_eq!(rotated.status, 200, "{rotated:?}");
        Webhook::new(text(&rotated.json()["secret"])).unwrap()
    };
    let fits = |received: &Received, webhook: &Webhook| webhook.verify(&received.body, &received.headers).is_ok();
    let new = rotate(1).await;
    post(manager, "order.paid", json!({}), None).await;
    until_received(&receiver, 1).await;
    // Which of the two it was before the change is heard of does not matter, so the next one is looked at.
    let both = |received: &Received| fits(received, &old) && fits(received, &new);
    testkit::drain("both fit", PATIENCE, async || {
        post(manager, "order.paid", json!({}), None).await;
        receiver.received().last().is_some_and(both)
    })
    .await;
    // The overlap ends by the clock alone: nobody is told.
    sqlx::query("update pillarbox_hub.secret set expires_at = clock_timestamp() + interval '1500 ms' where expires_at is not null")
        .execute(db)
        .await
        .unwrap();
    let end = std::time::Instant::now() + Duration::from_millis(1_500);
    testkit::drain("the new one alone fits", PATIENCE, async || {
        post(manager, "order.paid", json!({}), None).await;
        receiver.received().last().is_some_and(|received| fits(received, &new) && !fits(received, &old))
    })
    .await;
    assert!(std::time::Instant::now() >= end, "not before its end");
    let newest = rotate(0).await;
    testkit::drain("at once", PATIENCE, async || {
        post(manager, "order.paid", json!({}), None).await;
        receiver.received().last().is_some_and(|received| fits(received, &newest) && !fits(received, &new))
    })
    .await;
    world.app.stop().await;
    assert!(receiver.received().iter().all(|one| [&old, &new, &newest].into_iter().any(|webhook| fits(one, webhook))));
}
