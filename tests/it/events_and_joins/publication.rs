//! How soon the joins service knows what the events service has answered.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::json;
use server::migrations;
use server::settings::Role;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::events::fixture::{DEADLINE, event_id, event_path, meetup_with, post_action, publish_event};
use crate::joins::fixture::post_join_action;
use crate::support::lock_waits;

#[tokio::test]
async fn in_one_process_joins_know_a_change_when_it_is_answered() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let owner = app.user(Uuid::now_v7(), None);
    // The shard workers claim their shards at the start.
    let first = publish_event(&owner, meetup_with(json!({}))).await;
    let stats = format!("/join/v1/events/{}/stats", event_id(&first));
    eventually("the joins service runs", DEADLINE, async || owner.get(&stats).await.status == 200).await;
    for number in 0..20 {
        let event = publish_event(&owner, meetup_with(json!({"capacity": 1}))).await;
        let join = async || post_join_action(&app.user(Uuid::now_v7(), None), event_id(&event), "join").await;
        let joined = join().await;
        assert_eq!((joined.status, &joined.json()["status"]), (201, &json!("active")), "event {number}: {joined:?}");
        let larger = owner.send(Method::PATCH, &event_path(&event), Some(json!({"capacity": 2}))).await;
        assert_eq!(larger.status, 200, "{larger:?}");
        assert_eq!(join().await.json()["status"], "active", "event {number} has two seats");
        assert_eq!(post_action(&owner, &event, "cancel").await.status, 200);
        join().await.assert_problem(409, "event-canceled");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_change_waits_neither_for_handlers_elsewhere_nor_for_ever() {
    let database = TestDatabase::new(&migrations()).await;
    let api = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api]).await;
    let owner = api.user(Uuid::now_v7(), None);
    let publish_time = async |owner: &testkit::Client| {
        let began = Instant::now();
        publish_event(owner, meetup_with(json!({}))).await;
        began.elapsed()
    };
    // No process handles the messages, so waiting for it would take the whole time limit.
    let mut times = Vec::new();
    for _ in 0..5 {
        times.push(publish_time(&owner).await);
    }
    times.sort();
    assert!(times[2] < Duration::from_millis(500), "{times:?}");
    api.stop().await;

    let app = TestApp::start(&database).await;
    let owner = app.user(Uuid::now_v7(), None);
    let known = publish_event(&owner, meetup_with(json!({}))).await;
    let stats = format!("/join/v1/events/{}/stats", event_id(&known));
    eventually("the joins service runs", DEADLINE, async || owner.get(&stats).await.status == 200).await;
    // A handler that cannot continue delays the answer for a bounded time only.
    let mut tx = database.pool().begin().await.unwrap();
    let lock = "select from pillarbox_joins.event_capacity where event_id = $1 for update";
    sqlx::query(lock).bind(event_id(&known)).execute(&mut *tx).await.unwrap();
    let began = Instant::now();
    let changed = owner.send(Method::PATCH, &event_path(&known), Some(json!({"capacity": 7}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    let took = began.elapsed();
    assert!(lock_waits(database.pool()).await > 0, "the handler waits");
    assert!((Duration::from_millis(900)..Duration::from_secs(5)).contains(&took), "{took:?}");
    tx.rollback().await.unwrap();
    app.stop().await;
}
