//! The fixture of the hub's tests: a running hub with clients, and helpers that wait for outcomes.

use std::time::Duration;

use chrono::{TimeDelta, Utc};
use hyper::Method;
use pillarbox::operations::replays::{self, Request};
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, Receiver, Response, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::support::{DEADLINE, caller, text};

/// The first size, or the second one when `PBX_SOAK` is set.
pub(crate) fn test_size(normal: usize, soak: usize) -> usize {
    if std::env::var_os("PBX_SOAK").is_some() { soak } else { normal }
}

/// The median and the 99th percentile.
pub(crate) fn percentiles(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

/// A running hub with its own database, and a client with the role `manage` in the tenant `acme`.
pub(crate) struct Fixture {
    pub(crate) database: TestDatabase,
    pub(crate) app: TestApp,
    pub(crate) manager: Client,
}

impl Fixture {
    pub(crate) async fn start() -> Fixture {
        Fixture::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut Settings)) -> Fixture {
        let database = TestDatabase::new(&migrations()).await;
        let app = TestApp::start_with(&database, change).await;
        let manager = caller(&app, "manage", "acme").await;
        Fixture { database, app, manager }
    }
}

/// Creates a subscriber of all event types, with these fields added or replaced. Returns its representation.
pub(crate) async fn subscribe(manager: &Client, url: &str, fields: Value) -> Value {
    let mut body = json!({"name": "test", "url": url, "event_types": ["*"]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let made = manager.post("/hub/v1/subscribers", body).await;
    assert_eq!(made.status, 201, "{made:?}");
    made.json()
}

/// Posts one event. Returns its id.
pub(crate) async fn post(producer: &Client, event_type: &str, payload: Value, ordering_key: Option<&str>) -> String {
    let mut event = json!({"event_type": event_type, "payload": payload});
    if let Some(key) = ordering_key {
        event["ordering_key"] = key.into();
    }
    let posted = producer.post("/hub/v1/events", event).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    posted.json()["event_id"].as_str().unwrap().to_owned()
}

/// Posts one event in SQL. Returns its id.
pub(crate) async fn post_in_sql(db: &PgPool, tenant: &str, topic: &str, payload: &Value) -> Uuid {
    let query = "select pillarbox.post($1, $2::json, tenant => $3)";
    sqlx::query_scalar(query).bind(topic).bind(payload.to_string()).bind(tenant).fetch_one(db).await.unwrap()
}

/// Waits until fan-out has decided about an event. Returns it as the API shows it.
pub(crate) async fn wait_for_fan_out(manager: &Client, event: &Uuid) -> Value {
    eventually(&format!("{event} is fanned out or rejected"), DEADLINE, async || {
        let event = manager.get(&format!("/hub/v1/events/{event}")).await.json();
        if event["outcome"] == "pending" { Err(event) } else { Ok(event) }
    })
    .await
}

/// Fails unless the events were accepted. A producer that repeats its request after any other answer hides errors of the
/// server.
pub(crate) fn assert_accepted(answer: &Response) {
    assert_eq!(answer.status, 202, "{answer:?}");
}

/// The API path of a subscriber.
pub(crate) fn subscriber_path(subscriber: &Value) -> String {
    format!("/hub/v1/subscribers/{}", text(&subscriber["id"]))
}

pub(crate) async fn wait_for_webhooks(receiver: &Receiver, count: usize) {
    eventually(&format!("{count} webhooks are received"), DEADLINE, async || receiver.count() >= count).await;
}

/// The numbers in the payloads that a receiver has got, in order.
pub(crate) fn received_numbers(receiver: &Receiver) -> Vec<u64> {
    receiver.received().iter().map(|received| received.json()["n"].as_u64().unwrap()).collect()
}

/// Waits until a hub event has this outcome for a subscriber. Returns the outcome as the API shows it.
pub(crate) async fn wait_for_outcome(manager: &Client, event_id: &str, subscriber: &Value, wanted: &str) -> Value {
    eventually(&format!("{event_id} is {wanted}"), DEADLINE, async || {
        let event = manager.get(&format!("/hub/v1/events/{event_id}")).await.json();
        let outcomes = event["outcomes"].as_array().cloned().unwrap_or_default();
        let found = outcomes.into_iter().find(|outcome| outcome["subscriber_id"] == subscriber["id"]);
        match found {
            Some(outcome) if outcome["outcome"] == wanted => Ok(outcome),
            other => Err(other),
        }
    })
    .await
}

/// The attempts of a hub message, oldest first: status and outcome of each.
pub(crate) async fn attempts(manager: &Client, outcome: &Value) -> Vec<(Option<u64>, String)> {
    let path = format!("/hub/v1/messages/{}/attempts", text(&outcome["message_id"]));
    let items = manager.get(&path).await.json()["items"].as_array().unwrap().clone();
    items.iter().map(|item| (item["status"].as_u64(), text(&item["outcome"]).to_owned())).collect()
}

/// The dead letters of a subscriber, oldest first.
pub(crate) async fn dead_letters(manager: &Client, subscriber: &Value) -> Vec<Value> {
    let path = format!("/hub/v1/dead-letters?limit=100&subscriber_id={}", text(&subscriber["id"]));
    let mut items = manager.get(&path).await.json()["items"].as_array().unwrap().clone();
    items.reverse();
    items
}

/// Waits until a subscriber has this number of dead letters. Returns them, oldest first.
pub(crate) async fn wait_for_dead_letters(manager: &Client, subscriber: &Value, count: usize) -> Vec<Value> {
    eventually(&format!("{count} dead letters"), DEADLINE, async || match dead_letters(manager, subscriber).await {
        dead if dead.len() == count => Ok(dead),
        other => Err(other.len()),
    })
    .await
}

/// Events with the payload `{"lane": .., "n": ..}`: for each number one event of each lane.
pub(crate) fn numbered_events(lanes: usize, numbers: impl IntoIterator<Item = usize>) -> Vec<Value> {
    let event = |lane: usize, n: usize| {
        let lane = format!("lane-{lane}");
        json!({"event_type": "test.numbered", "ordering_key": lane, "payload": {"lane": lane, "n": n}})
    };
    numbers.into_iter().flat_map(|n| (0..lanes).map(move |lane| event(lane, n))).collect()
}

/// Posts the events in one batch. Returns their ids.
pub(crate) async fn post_batch(producer: &Client, events: Vec<Value>) -> Vec<String> {
    let posted = producer.post("/hub/v1/events/batch", json!({ "events": events })).await;
    assert_eq!(posted.status, 202, "{posted:?}");
    posted.json()["event_ids"].as_array().unwrap().iter().map(|id| text(id).to_owned()).collect()
}

/// Replays the last hour for the fan-out consumer, and waits until the replay is done.
pub(crate) async fn replay_fanout(db: &PgPool, again: bool) {
    let (from, to) = (Utc::now() - TimeDelta::hours(1), Utc::now() + TimeDelta::minutes(1));
    let request = Request { consumer: "hub.fanout".to_owned(), from, to, again };
    let id = replays::request(db, &request).await.unwrap().unwrap();
    eventually("the replay is done", DEADLINE, async || replays::find(db, id).await.unwrap().unwrap().is_done()).await;
}

/// The JSON pointers of a 422 answer.
pub(crate) fn error_pointers(answer: &Response) -> Vec<String> {
    answer.assert_problem(422, "validation-failed");
    let errors = answer.json()["errors"].as_array().unwrap().clone();
    errors.iter().map(|error| error["pointer"].as_str().unwrap().to_owned()).collect()
}

/// Changes a subscriber.
pub(crate) async fn patch_subscriber(client: &Client, id: Uuid, change: Value) -> Response {
    client.send(Method::PATCH, &format!("/hub/v1/subscribers/{id}"), Some(change)).await
}
