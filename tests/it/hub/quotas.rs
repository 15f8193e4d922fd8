//! The quotas of a tenant: subscribers and waiting messages.

use hyper::Method;
use serde_json::json;
use testkit::{Receiver, eventually};

use crate::hub::fixture::{
    Fixture, assert_accepted, numbered_events, post_batch, subscribe, subscriber_path, wait_for_webhooks,
};
use crate::support::{DEADLINE, caller};

#[tokio::test(flavor = "multi_thread")]
async fn twenty_racers_create_no_more_subscribers_than_the_quota() {
    let fixture = Fixture::start_with(|settings| {
        (settings.pool_max, settings.hub.subscribers_max) = (20, 3);
    })
    .await;
    let body = json!({"name": "test", "url": "https://example.com/hook", "event_types": ["*"]});
    let racing: Vec<_> = (0..20)
        .map(|_| {
            let (manager, body) = (fixture.manager.clone(), body.clone());
            tokio::spawn(async move { manager.post("/hub/v1/subscribers", body).await })
        })
        .collect();
    let mut created = 0;
    for answer in racing {
        let answer = answer.await.unwrap();
        if answer.status == 201 {
            created += 1;
        } else {
            answer.assert_problem(409, "too-many-subscribers");
            assert!(answer.text.contains("at most 3 subscribers (`hub.subscribers_max`)"), "{answer:?}");
        }
    }
    assert_eq!(created, 3);
    subscribe(&caller(&fixture.app, "manage", "other").await, "https://example.com/hook", json!({})).await;
    fixture.app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_refused_while_too_many_messages_of_their_tenant_wait() {
    const WAITING_MAX: usize = 100;
    let fixture = Fixture::start_with(|settings| settings.hub.waiting_max = WAITING_MAX as u64).await;
    let (manager, other) = (&fixture.manager, caller(&fixture.app, "manage", "other").await);
    let receiver = Receiver::start().await;
    let subscriber = subscribe(manager, &receiver.url(), json!({})).await;
    let path = subscriber_path(&subscriber);
    assert_eq!(manager.send(Method::POST, &format!("{path}/pause"), None).await.status, 200);
    post_batch(manager, numbered_events(WAITING_MAX, [1])).await;
    let event = json!({"event_type": "test.one", "payload": {}});
    let (mut accepted, is_refused) = (WAITING_MAX, "the tenant is refused");
    let refused =
        eventually(is_refused, DEADLINE, async || match manager.post("/hub/v1/events", event.clone()).await {
            answer if answer.status == 202 => {
                accepted += 1;
                Err(answer)
            }
            answer => Ok(answer),
        })
        .await;
    refused.assert_problem(429, "too-many-waiting");
    assert!(refused.text.contains("`acme`") && refused.text.contains("`hub.waiting_max`"), "{refused:?}");
    assert!(refused.header("retry-after").parse::<u64>().unwrap() > 0);
    let batch = manager.post("/hub/v1/events/batch", json!({"events": [event]})).await;
    batch.assert_problem(429, "too-many-waiting");
    assert_accepted(&other.post("/hub/v1/events", event.clone()).await);

    assert_eq!(manager.send(Method::POST, &format!("{path}/resume"), None).await.status, 200);
    wait_for_webhooks(&receiver, accepted).await;
    eventually("the tenant is accepted again", DEADLINE, async || {
        match manager.post("/hub/v1/events", event.clone()).await {
            answer if answer.status == 202 => Ok(()),
            answer => Err(answer),
        }
    })
    .await;
    fixture.app.stop().await;
}
