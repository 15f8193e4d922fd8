//! The values of a subscriber's headers are sent to the receiver that they were stored for, and to no other.

use serde_json::{Value, json};
use testkit::{Client, Receiver};

use crate::hub::fixture::{Fixture, error_pointers, patch_subscriber, subscribe, subscriber_path};
use crate::support::uuid_of;

async fn test_delivery(client: &Client, subscriber: &Value) {
    let tested = client.post(&format!("{}/test", subscriber_path(subscriber)), json!({})).await;
    assert_eq!(tested.json()["delivered"], true, "{tested:?}");
}

#[tokio::test]
async fn stored_header_values_are_not_sent_to_another_origin() {
    let fixture = Fixture::start().await;
    let acme = &fixture.manager;
    let (receiver, thief) = (Receiver::start().await, Receiver::start().await);
    let fields = json!({"headers": {"authorization": "Bearer hunter2", "x-team": "blue"}});
    let subscriber = subscribe(acme, &receiver.url(), fields).await;
    let id = uuid_of(&subscriber["id"]);

    for (change, pointers) in [
        (json!({"url": thief.url()}), vec!["/headers"]),
        (json!({"url": receiver.url().replace("127.0.0.1", "localhost")}), vec!["/headers"]),
        (json!({"url": receiver.url().replace("http://", "https://")}), vec!["/headers"]),
        (json!({"url": thief.url(), "headers": {"authorization": "***"}}), vec!["/headers/authorization"]),
        (
            json!({"url": thief.url(), "headers": {"Authorization": "***", "x-team": "***", "x-new": "1"}}),
            vec!["/headers/Authorization", "/headers/x-team"],
        ),
    ] {
        let refused = patch_subscriber(acme, id, change.clone()).await;
        assert_eq!(error_pointers(&refused), pointers, "{change}");
        assert!(refused.text.contains("another receiver"), "the problem gives the reason: {refused:?}");
    }
    test_delivery(acme, &subscriber).await;
    assert_eq!(thief.count(), 0);
    let received = receiver.received().pop().unwrap();
    assert_eq!(received.header("authorization"), "Bearer hunter2", "a refused change changes nothing");

    // Another path of the same receiver gets the stored values.
    let moved = receiver.url().replace("/hook", "/other");
    let changed = patch_subscriber(acme, id, json!({"url": moved, "headers": {"authorization": "***"}})).await;
    assert_eq!((changed.status, &changed.json()["headers"]), (200, &json!({"authorization": "***"})));
    let changed = patch_subscriber(acme, id, json!({"url": receiver.url()})).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    test_delivery(acme, &subscriber).await;
    assert_eq!(receiver.received().pop().unwrap().header("authorization"), "Bearer hunter2");

    // Values that the request itself contains are sent to the new receiver, and no others.
    let anew = json!({"url": thief.url(), "headers": {"x-token": "new"}});
    let changed = patch_subscriber(acme, id, anew).await;
    assert_eq!((changed.status, &changed.json()["headers"]), (200, &json!({"x-token": "***"})), "{changed:?}");
    test_delivery(acme, &subscriber).await;
    for headers in [json!({}), Value::Null] {
        let stored = patch_subscriber(acme, id, json!({"url": receiver.url(), "headers": {"x-a": "hunter2"}})).await;
        assert_eq!(stored.status, 200, "{stored:?}");
        let changed = patch_subscriber(acme, id, json!({"url": thief.url(), "headers": headers})).await;
        assert_eq!((changed.status, &changed.json()["headers"]), (200, &json!({})), "{changed:?}");
        test_delivery(acme, &subscriber).await;
    }
    // Without stored headers, the URL alone may change.
    assert_eq!(patch_subscriber(acme, id, json!({"url": receiver.url()})).await.status, 200);
    assert_eq!(thief.count(), 3);
    for received in thief.received() {
        assert!(!format!("{:?}", received.headers).contains("hunter2"), "{received:?}");
    }
    fixture.app.stop().await;
}
