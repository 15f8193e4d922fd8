//! Subscribers after a failover: those that the new primary has get webhooks, whatever versions repeat.

use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Receiver, eventually};

use super::fixture::{Cluster, post_again};
use crate::hub::fixture::{post, subscribe, wait_for_webhooks};
use crate::support::{DEADLINE, text};

/// Creates a subscriber as soon as the server is connected again.
async fn subscribe_again(admin: &Client, url: &str) -> Value {
    let body = json!({"name": "test", "url": url, "event_types": ["*"]});
    eventually("the subscriber is created", DEADLINE, async || {
        let made = admin.send(Method::POST, "/hub/v1/subscribers", Some(body.clone())).await;
        if made.status == 201 { Ok(made.json()) } else { Err(made.status) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_that_is_created_again_after_a_failover_gets_its_webhooks() {
    let cluster = Cluster::start().await;
    let app = cluster.start_app(|_| {}).await;
    let (admin, receiver, again) = (app.admin(), Receiver::start().await, Receiver::start().await);
    cluster.cut_replication().await;
    let lost = subscribe(&admin, &receiver.url(), json!({})).await;
    post(&admin, "test.posted", json!({"n": 1}), Some("lane")).await;
    wait_for_webhooks(&receiver, 1).await;

    cluster.fail_over().await;
    let subscriber = subscribe_again(&admin, &again.url()).await;
    assert_ne!(text(&subscriber["id"]), text(&lost["id"]));
    for n in 2..=3 {
        let event = json!({"event_type": "test.posted", "ordering_key": "lane", "payload": {"n": n}});
        post_again(&admin, event).await;
    }
    wait_for_webhooks(&again, 2).await;
    let sequence: Vec<String> =
        again.received().iter().map(|received| received.header("webhook-seq").to_owned()).collect();
    assert_eq!(sequence, ["1", "2"], "the lane starts anew: its first message was lost");
    assert_eq!(receiver.count(), 1, "the lost subscriber gets nothing");
    app.stop().await;
}
