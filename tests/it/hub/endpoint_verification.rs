//! An endpoint that has to be verified gets nothing but challenges until it has answered one.

use serde_json::{Value, json};
use standardwebhooks::Webhook;
use testkit::{Client, Received, Receiver, Reply, eventually};

use crate::hub::fixture::{
    Fixture, patch_subscriber, post, subscribe, subscriber_path, wait_for_outcome, wait_for_webhooks,
};
use crate::support::{DEADLINE, text, uuid_of};

/// Answers every request with its own body.
fn echo(received: &Received) -> Reply {
    Reply { body: String::from_utf8_lossy(&received.body).into_owned(), ..Reply::status(200) }
}

/// Answers a challenge with its bare text, after white space.
fn bare(received: &Received) -> Reply {
    let challenge = received.json()["challenge"].as_str().map(|text| format!("\n{text}\n"));
    Reply { body: challenge.unwrap_or_default(), ..Reply::status(200) }
}

async fn verify(manager: &Client, subscriber: &Value) -> Value {
    let verified = manager.post(&format!("{}/verify", subscriber_path(subscriber)), json!({})).await;
    assert_eq!(verified.status, 200, "{verified:?}");
    verified.json()
}

async fn wait_until_verified(manager: &Client, subscriber: &Value) {
    eventually("the endpoint is verified", DEADLINE, async || {
        manager.get(&subscriber_path(subscriber)).await.json().get("unverified_since").is_none()
    })
    .await;
}

#[tokio::test]
async fn an_endpoint_that_has_not_answered_its_challenge_gets_no_webhooks() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver = Receiver::start().await;
    let fields = json!({"verify_endpoint": true, "format": "cloudevents", "batch": {"max": 10}});
    let subscriber = subscribe(manager, &receiver.url(), fields).await;
    assert!(subscriber["unverified_since"].is_string(), "{subscriber}");
    wait_for_webhooks(&receiver, 1).await;
    let event = post(manager, "test.a", json!({"n": 1}), None).await;
    wait_for_outcome(manager, &event, &subscriber, "pending").await;
    let result = verify(manager, &subscriber).await;
    assert_eq!((&result["verified"], &result["error"]), (&json!(false), &json!("challenge")), "{result}");
    receiver.set_reply(|received| Reply { status: 404, ..echo(received) });
    let result = verify(manager, &subscriber).await;
    assert_eq!(
        (&result["verified"], &result["status"], &result["error"]),
        (&json!(false), &json!(404), &json!("status"))
    );
    // Resuming it does not verify it.
    let resumed = manager.post(&format!("{}/resume", subscriber_path(&subscriber)), json!({})).await;
    assert!(resumed.status == 200 && resumed.json()["unverified_since"].is_string(), "{resumed:?}");
    let challenges = receiver.received();
    assert_eq!(challenges.len(), 3, "nothing but challenges: {challenges:?}");
    let webhook = Webhook::new(text(&subscriber["secret"])).unwrap();
    for challenge in &challenges {
        webhook.verify(&challenge.body, &challenge.headers).unwrap();
        assert_eq!(challenge.header("webhook-event-type"), "hub.endpoint.verification");
        assert_eq!(challenge.header("content-type"), "application/json");
        assert!(challenge.headers.get("webhook-batch").is_none());
        assert_eq!(challenge.json()["subscriber_id"], subscriber["id"]);
    }
    let texts: std::collections::HashSet<String> =
        challenges.iter().map(|one| text(&one.json()["challenge"]).to_owned()).collect();
    assert_eq!(texts.len(), 3, "each is another one");

    receiver.set_reply(echo);
    assert_eq!(verify(manager, &subscriber).await, json!({"verified": true}));
    wait_for_outcome(manager, &event, &subscriber, "delivered").await;
    assert_eq!(verify(manager, &subscriber).await, json!({"verified": true}));
    assert_eq!(receiver.count(), 5, "a verified endpoint gets no further challenge");
    fixture.app.stop().await;
}

#[tokio::test]
async fn another_origin_has_to_be_verified_again() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (first, second) = (Receiver::with_reply(echo).await, Receiver::with_reply(|_| Reply::status(500)).await);
    let subscriber =
        subscribe(manager, &first.url(), json!({"verify_endpoint": true, "retry_backoff_seconds": [1]})).await;
    wait_until_verified(manager, &subscriber).await;
    let id = uuid_of(&subscriber["id"]);
    let elsewhere = first.url().replace("/hook", "/other");
    let moved = patch_subscriber(manager, id, json!({"url": elsewhere})).await;
    assert!(moved.status == 200 && moved.json().get("unverified_since").is_none(), "the same origin: {moved:?}");
    let moved = patch_subscriber(manager, id, json!({"url": second.url()})).await;
    assert!(moved.json()["unverified_since"].is_string(), "{moved:?}");
    let event = post(manager, "test.a", json!({"n": 1}), None).await;
    wait_for_outcome(manager, &event, &subscriber, "pending").await;
    wait_for_webhooks(&second, 1).await;
    second.set_reply(bare);
    assert_eq!(verify(manager, &subscriber).await, json!({"verified": true}));
    wait_for_outcome(manager, &event, &subscriber, "delivered").await;
    // Who no longer wants the proof does not wait for it. Who wants it again, does.
    for (wanted, url) in [(true, first.url()), (false, first.url()), (true, first.url())] {
        first.set_reply(|_| Reply::status(500));
        let changed = patch_subscriber(manager, id, json!({"verify_endpoint": wanted, "url": url})).await;
        assert_eq!(changed.json()["unverified_since"].is_string(), wanted, "{changed:?}");
    }
    // A challenge goes where webhooks may go, and nowhere else.
    let update = "update pillarbox_hub.subscriber set url = 'http://10.0.0.1/' where id = $1";
    sqlx::query(update).bind(id).execute(fixture.database.pool()).await.unwrap();
    let refused = verify(manager, &subscriber).await;
    assert_eq!((&refused["verified"], &refused["error"]), (&json!(false), &json!("address_refused")), "{refused}");
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_operator_can_require_that_every_endpoint_is_verified() {
    let fixture = Fixture::start_with(|settings| settings.hub.verify_endpoints = true).await;
    let manager = &fixture.manager;
    let receiver = Receiver::with_reply(|_| Reply::status(500)).await;
    let subscriber = subscribe(manager, &receiver.url(), json!({"verify_endpoint": false})).await;
    assert!(subscriber["unverified_since"].is_string(), "{subscriber}");
    let unwanted =
        patch_subscriber(manager, uuid_of(&subscriber["id"]), json!({"name": "b", "verify_endpoint": false})).await;
    assert!(unwanted.json()["unverified_since"].is_string(), "{unwanted:?}");
    wait_for_webhooks(&receiver, 1).await;
    post(manager, "test.a", json!({"n": 1}), None).await;
    receiver.set_reply(echo);
    assert_eq!(verify(manager, &subscriber).await, json!({"verified": true}));
    wait_for_webhooks(&receiver, 3).await;
    fixture.app.stop().await;
    let webhooks = receiver.received().split_off(2);
    assert_eq!(webhooks.iter().map(|webhook| webhook.json()["n"].clone()).collect::<Vec<_>>(), [json!(1)]);
}
