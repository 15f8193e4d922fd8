//! The status of an event: pending until it is fanned out, processing until all its messages have a final outcome, completed.

use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply, TestApp, eventually};

use crate::hub::fixture::{Fixture, post, subscribe, subscriber_path, wait_for_webhooks};
use crate::hub::replays::request_replay;
use crate::hub::rows::start_api_only;
use crate::hub::stream_fixture::{create_stream, pull_count, seek, send};
use crate::support::{DEADLINE, caller, text};

async fn show(manager: &Client, event_id: &str) -> Value {
    manager.get(&format!("/hub/v1/events/{event_id}")).await.json()
}

/// The outcomes in the list of events, without those that the hub itself posts.
async fn listed_outcomes(manager: &Client) -> Vec<Value> {
    let listed = manager.get("/hub/v1/events?event_type=test").await.json();
    listed["items"].as_array().unwrap().iter().map(|event| event["outcome"].clone()).collect()
}

async fn wait_for_status(manager: &Client, event_id: &str, wanted: &str) -> Value {
    eventually(&format!("{event_id} is {wanted}"), DEADLINE, async || match show(manager, event_id).await {
        event if event["status"] == wanted => Ok(event),
        other => Err(other),
    })
    .await
}

/// `pillarbox.post` returns a UUID without `evt_`.
#[tokio::test]
async fn an_event_is_found_replayed_and_sought_by_its_uuid_alone() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let receiver = Receiver::start().await;
    subscribe(&manager, &receiver.url(), json!({})).await;
    create_stream(&manager, json!({})).await;
    let first = post(&manager, "test.first", json!({"n": 1}), None).await;
    post(&manager, "test.second", json!({"n": 2}), None).await;
    wait_for_webhooks(&receiver, 2).await;
    pull_count(&manager, "a", 2).await;
    let uuid = first.strip_prefix("evt_").unwrap();
    assert_eq!(show(&manager, uuid).await["event_id"], json!(first));

    let replay = request_replay(&manager, json!({"event_ids": [uuid]})).await;
    wait_for_webhooks(&receiver, 3).await;
    let replayed = receiver.received().remove(2);
    assert_eq!((replayed.header("webhook-id"), replayed.header("webhook-replay")), (&*first, text(&replay["id"])));

    let sought = seek(&manager, json!({"event_id": uuid, "force": true})).await;
    assert_eq!(sought, seek(&manager, json!({"event_id": first, "force": true})).await);
    assert_eq!(send(&manager, "seek", json!({"event_id": "evt", "force": true})).await.status, 422);
    app.stop().await;
    drop(database);
}

#[tokio::test]
async fn an_event_without_subscribers_differs_from_one_that_is_not_fanned_out() {
    let (database, api) = start_api_only().await;
    let manager = caller(&api, "manage", "acme").await;
    let unheard = post(&manager, "test.unheard", json!({}), None).await;
    let event = show(&manager, &unheard).await;
    assert_eq!((&event["status"], &event["outcomes"]), (&json!("pending"), &json!([])));
    assert_eq!((&event["outcome"], listed_outcomes(&manager).await), (&json!("pending"), vec![json!("pending")]));
    api.stop().await;

    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let event = wait_for_status(&manager, &unheard, "completed").await;
    assert_eq!((&event["outcomes"], &event["outcome"]), (&json!([]), &json!("unmatched")));

    let (good, bad) = (Receiver::start().await, Receiver::with_reply(|_| Reply::status(503)).await);
    let reached = subscribe(&manager, &good.url(), json!({"event_types": ["test.heard"]})).await;
    let fields = json!({"event_types": ["test.heard"], "retry_backoff_seconds": [1]});
    let failing = subscribe(&manager, &bad.url(), fields).await;
    let heard = post(&manager, "test.heard", json!({}), None).await;
    let event = wait_for_status(&manager, &heard, "processing").await;
    assert_eq!(event["outcomes"].as_array().unwrap().len(), 2, "{event}");
    let event = wait_for_status(&manager, &heard, "completed").await;
    let mut outcomes: Vec<&str> =
        event["outcomes"].as_array().unwrap().iter().filter_map(|outcome| outcome["outcome"].as_str()).collect();
    outcomes.sort_unstable();
    assert_eq!((outcomes, &event["outcome"]), (vec!["dead", "delivered"], &json!("matched")));

    // A filter that does not match is not the absence of subscribers, and a deleted subscriber was one.
    let filter = json!([{"pointer": "/a", "op": "exists", "value": true}]);
    subscribe(&manager, &good.url(), json!({"event_types": ["test.filtered"], "filter": filter})).await;
    let filtered = post(&manager, "test.filtered", json!({}), None).await;
    let event = wait_for_status(&manager, &filtered, "completed").await;
    assert_eq!((&event["outcome"], event["outcomes"].as_array().unwrap().len()), (&json!("matched"), 1));
    let only = post(&manager, "test.heard", json!({}), None).await;
    wait_for_status(&manager, &only, "completed").await;
    for subscriber in [reached, failing] {
        let deleted = manager.send(hyper::Method::DELETE, &subscriber_path(&subscriber), None).await;
        assert_eq!(deleted.status, 204, "{deleted:?}");
    }
    let event = show(&manager, &only).await;
    assert_eq!((&event["outcome"], &event["outcomes"]), (&json!("matched"), &json!([])));
    let newest_first = ["matched", "matched", "matched", "unmatched"].map(|outcome| json!(outcome));
    assert_eq!(listed_outcomes(&manager).await, newest_first);
    app.stop().await;
}

#[tokio::test]
async fn an_event_that_only_a_stream_contains_is_matched_and_completed_without_outcomes() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let filter = json!([{"pointer": "/n", "op": "eq", "value": 1}]);
    create_stream(&manager, json!({"event_types": ["test.pulled"], "filter": filter})).await;
    let pulled = post(&manager, "test.pulled", json!({"n": 1}), None).await;
    let filtered = post(&manager, "test.pulled", json!({"n": 2}), None).await;
    let event = wait_for_status(&manager, &pulled, "completed").await;
    assert_eq!((&event["outcome"], &event["outcomes"]), (&json!("matched"), &json!([])));
    let event = wait_for_status(&manager, &filtered, "completed").await;
    assert_eq!((&event["outcome"], &event["outcomes"]), (&json!("unmatched"), &json!([])), "no stream contains it");
    assert_eq!(listed_outcomes(&manager).await, ["unmatched", "matched"].map(|outcome| json!(outcome)));
    // As with a subscriber that is deleted.
    assert_eq!(manager.delete("/hub/v1/streams/orders").await.status, 204);
    assert_eq!(show(&manager, &pulled).await["outcome"], "matched");
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
