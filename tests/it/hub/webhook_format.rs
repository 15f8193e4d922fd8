//! The body, the headers and the signatures of a webhook.

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use standardwebhooks::Webhook;
use testkit::{Received, Receiver, Reply, eventually};

use crate::hub::fixture::{Fixture, post, subscribe, subscriber_path, wait_for_webhooks};
use crate::support::{DEADLINE, text};

#[tokio::test]
async fn each_format_has_its_body_and_custom_headers_are_sent() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let mut made = Vec::new();
    for format in ["raw", "standard", "cloudevents"] {
        let receiver = Receiver::start().await;
        let fields = json!({"format": format, "headers": {"authorization": "Bearer hush", "x-team": "blue"}});
        let subscriber = subscribe(manager, &receiver.url(), fields).await;
        made.push((format, receiver, subscriber));
    }
    // JSON that a library would write differently.
    let body = r#"{"event_type":"order.paid","payload":{ "z": 1.50, "a":"\u00fc",  "z":2 },"ordering_key":"k 1"}"#;
    let payload = r#"{ "z": 1.50, "a":"\u00fc",  "z":2 }"#;
    let event_id = post_text(manager, body).await;
    for (format, receiver, subscriber) in &made {
        wait_for_webhooks(receiver, 1).await;
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
        assert_eq!(received.header("webhook-event-type"), "order.paid", "{format}");
        Webhook::new(text(&subscriber["secret"])).unwrap().verify(&received.body, &received.headers).unwrap();
    }
    fixture.app.stop().await;
}

async fn post_text(manager: &testkit::Client, body: &str) -> String {
    let posted = manager.send_text(Method::POST, "/hub/v1/events", body).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    text(&posted.json()["event_id"]).to_owned()
}

#[tokio::test]
async fn retries_and_test_deliveries_name_their_event_type_in_a_header() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let mut failures = 1;
    let receiver = Receiver::with_reply(move |_| match std::mem::take(&mut failures) {
        1 => Reply::status(503),
        _ => Reply::status(200),
    })
    .await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"retry_backoff_seconds": [1]})).await;
    post(manager, "order.paid", json!({}), None).await;
    wait_for_webhooks(&receiver, 2).await;
    let tested = manager.post(&format!("{}/test", subscriber_path(&subscriber)), json!({})).await;
    assert_eq!(tested.json()["delivered"], true, "{tested:?}");
    fixture.app.stop().await;
    let types: Vec<String> =
        receiver.received().iter().map(|one| one.header("webhook-event-type").to_owned()).collect();
    assert_eq!(types, ["order.paid", "order.paid", "hub.test"]);
}

#[tokio::test]
async fn both_secrets_verify_during_the_overlap_and_only_the_new_one_after_it() {
    let fixture = Fixture::start().await;
    let (manager, db) = (&fixture.manager, fixture.database.pool());
    let receiver = Receiver::start().await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let old = Webhook::new(text(&subscriber["secret"])).unwrap();
    let rotate = async |hours: u64| {
        let path = format!("/hub/v1/subscribers/{}/rotate-secret", text(&subscriber["id"]));
        let rotated = manager.post(&path, json!({"overlap_hours": hours})).await;
        assert_eq!(rotated.status, 200, "{rotated:?}");
        Webhook::new(text(&rotated.json()["secret"])).unwrap()
    };
    let verifies = |received: &Received, webhook: &Webhook| webhook.verify(&received.body, &received.headers).is_ok();
    let new = rotate(1).await;
    post(manager, "order.paid", json!({}), None).await;
    wait_for_webhooks(&receiver, 1).await;
    // The first webhook may be signed before the dispatcher learns of the rotation, so check a later one.
    let both = |received: &Received| verifies(received, &old) && verifies(received, &new);
    eventually("both secrets verify", DEADLINE, async || {
        post(manager, "order.paid", json!({}), None).await;
        receiver.received().last().is_some_and(both)
    })
    .await;
    // The overlap ends by the clock; there is no notification.
    sqlx::query("update pillarbox_hub.secret set expires_at = clock_timestamp() + interval '1500 ms' where expires_at is not null")
        .execute(db)
        .await
        .unwrap();
    let end = std::time::Instant::now() + Duration::from_millis(1_500);
    eventually("only the new secret verifies", DEADLINE, async || {
        post(manager, "order.paid", json!({}), None).await;
        receiver.received().last().is_some_and(|received| verifies(received, &new) && !verifies(received, &old))
    })
    .await;
    assert!(std::time::Instant::now() >= end, "the old secret verifies until the overlap ends");
    let newest = rotate(0).await;
    eventually("a rotation without overlap is effective", DEADLINE, async || {
        post(manager, "order.paid", json!({}), None).await;
        receiver.received().last().is_some_and(|received| verifies(received, &newest) && !verifies(received, &new))
    })
    .await;
    fixture.app.stop().await;
    assert!(
        receiver.received().iter().all(|one| [&old, &new, &newest].into_iter().any(|webhook| verifies(one, webhook)))
    );
}
