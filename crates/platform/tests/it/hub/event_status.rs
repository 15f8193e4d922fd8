//! The status of an event: pending until it is fanned out, processing until all its messages have a final outcome, completed.

use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply, TestApp, eventually};

use crate::hub::fixture::{Fixture, post, subscribe};
use crate::hub::rows::start_api_only;
use crate::support::{DEADLINE, caller};

async fn show(manager: &Client, event_id: &str) -> Value {
    manager.get(&format!("/hub/v1/events/{event_id}")).await.json()
}

async fn wait_for_status(manager: &Client, event_id: &str, wanted: &str) -> Value {
    eventually(&format!("{event_id} is {wanted}"), DEADLINE, async || match show(manager, event_id).await {
        event if event["status"] == wanted => Ok(event),
        other => Err(other),
    })
    .await
}

#[tokio::test]
async fn an_event_that_nobody_subscribed_to_differs_from_one_that_is_not_fanned_out() {
    let (database, api) = start_api_only().await;
    let manager = caller(&api, "manage", "acme").await;
    let unheard = post(&manager, "test.unheard", json!({}), None).await;
    let event = show(&manager, &unheard).await;
    assert_eq!((&event["status"], &event["outcomes"]), (&json!("pending"), &json!([])));
    api.stop().await;

    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let event = wait_for_status(&manager, &unheard, "completed").await;
    assert_eq!(event["outcomes"], json!([]));

    let (good, bad) = (Receiver::start().await, Receiver::with_reply(|_| Reply::status(503)).await);
    subscribe(&manager, &good.url(), json!({"event_types": ["test.heard"]})).await;
    let fields = json!({"event_types": ["test.heard"], "retry_backoff_seconds": [1]});
    subscribe(&manager, &bad.url(), fields).await;
    let heard = post(&manager, "test.heard", json!({}), None).await;
    let event = wait_for_status(&manager, &heard, "processing").await;
    assert_eq!(event["outcomes"].as_array().unwrap().len(), 2, "{event}");
    let event = wait_for_status(&manager, &heard, "completed").await;
    let mut outcomes: Vec<&str> =
        event["outcomes"].as_array().unwrap().iter().filter_map(|outcome| outcome["outcome"].as_str()).collect();
    outcomes.sort_unstable();
    assert_eq!(outcomes, ["dead", "delivered"]);
    app.stop().await;
}

#[tokio::test]
async fn the_status_of_an_event_does_not_depend_on_other_consumers() {
    let fixture = Fixture::start().await;
    let event = post(&fixture.manager, "test.posted", json!({}), None).await;
    wait_for_status(&fixture.manager, &event, "completed").await;
    // The status of the message for this consumer cannot be determined.
    let broken = "insert into pillarbox.cursor (consumer, kind, included) values ('broken', 'handler', '(')";
    sqlx::query(broken).execute(fixture.database.pool()).await.unwrap();
    let shown = fixture.manager.get(&format!("/hub/v1/events/{event}")).await;
    assert_eq!((shown.status, &shown.json()["status"]), (200, &json!("completed")), "{shown:?}");
    fixture.app.stop().await;
}
