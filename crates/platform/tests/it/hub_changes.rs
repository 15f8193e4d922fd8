//! A subscriber that is made, changed or deleted while events come.

use hyper::Method;
use serde_json::json;
use testkit::{Receiver, Reply, drain};

use crate::hub_delivery::{PATIENCE, post, subscribe, until_received};
use crate::hub_world::{World, text, until_outcome};

#[tokio::test]
async fn an_event_that_is_posted_right_after_its_subscriber_was_made_is_delivered() {
    let world = World::start().await;
    for n in 0..20 {
        let receiver = Receiver::start().await;
        let event_type = format!("test.s{n}");
        subscribe(&world.manager, &receiver.url(), json!({"event_types": [event_type]})).await;
        let event_id = post(&world.manager, &event_type, json!({}), None).await;
        until_received(&receiver, 1).await;
        assert_eq!(receiver.received()[0].header("webhook-id"), event_id);
    }
    world.app.stop().await;
}

#[tokio::test]
async fn a_new_address_is_where_the_next_attempt_goes_also_of_what_waits() {
    let world = World::start().await;
    let manager = &world.manager;
    let (old, new) = (Receiver::replying(|_| Reply::status(503)).await, Receiver::start().await);
    let subscriber = subscribe(manager, &old.url(), json!({"retry_backoff_seconds": [2, 2, 2]})).await;
    let first = post(manager, "test.a", json!({"n": 1}), Some("lane")).await;
    let second = post(manager, "test.a", json!({"n": 2}), Some("lane")).await;
    until_outcome(manager, &first, &subscriber, "failed").await;
    let path = format!("/hub/v1/subscribers/{}", text(&subscriber["id"]));
    let changed = manager.send(Method::PATCH, &path, Some(json!({"url": new.url()}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    let third = post(manager, "test.a", json!({"n": 3}), Some("lane")).await;
    for event_id in [&first, &second, &third] {
        until_outcome(manager, event_id, &subscriber, "delivered").await;
    }
    world.app.stop().await;
    assert_eq!(old.count(), 1, "only what went there before");
    let numbers: Vec<_> = new.received().iter().map(|received| received.json()["n"].clone()).collect();
    assert_eq!(numbers, [1, 2, 3]);
}

#[tokio::test]
async fn a_deleted_subscriber_gets_nothing_any_more_not_even_what_waited() {
    let world = World::start().await;
    let manager = &world.manager;
    let (deleted, other) = (Receiver::replying(|_| Reply::status(503)).await, Receiver::start().await);
    let subscriber = subscribe(manager, &deleted.url(), json!({"retry_backoff_seconds": [1, 1, 1]})).await;
    subscribe(manager, &other.url(), json!({})).await;
    let event_id = post(manager, "test.a", json!({}), Some("lane")).await;
    until_outcome(manager, &event_id, &subscriber, "failed").await;
    let path = format!("/hub/v1/subscribers/{}", text(&subscriber["id"]));
    assert_eq!(manager.delete(&path).await.status, 204);
    let before = deleted.count();
    let began = tokio::time::Instant::now();
    // For longer than its retry would have waited, with events that it would have got.
    let mut posted = 1;
    while began.elapsed() < std::time::Duration::from_millis(1_600) {
        post(manager, "test.a", json!({}), Some("lane")).await;
        posted += 1;
        until_received(&other, posted).await;
    }
    assert_eq!(deleted.count(), before, "nothing any more");
    let lanes = "select count(*) from pillarbox_hub.lane";
    let lanes = async || sqlx::query_scalar::<_, i64>(lanes).fetch_one(world.database.pool()).await.unwrap();
    drain("nothing of it waits", PATIENCE, async || lanes().await == 0).await;
    world.app.stop().await;
}
