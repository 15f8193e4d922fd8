//! The health of subscribers: what their attempts led to, from counts that the dispatcher saves once a minute.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, Receiver, Reply, TestApp, TestDatabase, eventually};

use crate::hub::fixture::{
    Fixture, numbered_events, post_batch, subscribe, subscriber_path, wait_for_dead_letters, wait_for_outcome,
    wait_for_webhooks,
};
use crate::support::{DEADLINE, caller, text};

async fn health(manager: &Client, subscriber: &Value, query: &str) -> Value {
    let shown = manager.get(&format!("{}/health{query}", subscriber_path(subscriber))).await;
    assert_eq!(shown.status, 200, "{shown:?}");
    shown.json()
}

async fn wait_for_state(manager: &Client, subscriber: &Value, wanted: &str) -> Value {
    eventually(&format!("the subscriber is {wanted}"), DEADLINE, async || {
        let shown = health(manager, subscriber, "").await;
        if shown["state"] == wanted { Ok(shown) } else { Err(shown) }
    })
    .await
}

fn events(count: usize) -> Vec<Value> {
    vec![json!({"event_type": "order.paid", "payload": {}}); count]
}

#[tokio::test]
async fn the_health_of_a_subscriber_has_every_attempt_its_success_rate_and_its_response_times() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let (healthy, failing) = (Receiver::start().await, Receiver::with_reply(|_| Reply::status(503)).await);
    let idle = subscribe(&manager, &healthy.url(), json!({"event_types": ["other.type"]})).await;
    let healthy_one = subscribe(&manager, &healthy.url(), json!({})).await;
    let failing_one = subscribe(&manager, &failing.url(), json!({"retry_backoff_seconds": []})).await;
    post_batch(&manager, events(22)).await;
    wait_for_webhooks(&healthy, 22).await;
    wait_for_dead_letters(&manager, &failing_one, 22).await;
    let state = wait_for_state(&manager, &failing_one, "breaker_open").await;
    assert!(state["failing_since"].is_string(), "{state}");
    assert_eq!(wait_for_state(&manager, &healthy_one, "healthy").await["failing_since"], Value::Null);
    // A dispatcher that stops saves the counts of the current minute, and the next one adds to them.
    app.stop().await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    failing.set_reply(|_| Reply::status(200));
    post_batch(&manager, events(10)).await;
    wait_for_webhooks(&healthy, 32).await;
    wait_for_webhooks(&failing, 32).await;
    wait_for_state(&manager, &failing_one, "healthy").await;
    app.stop().await;

    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    for resolution in ["minute", "hour", "day"] {
        let shown = health(&manager, &failing_one, &format!("?resolution={resolution}")).await;
        let totals = &shown["totals"];
        assert_eq!(
            (&totals["attempts"], &totals["delivered"], &totals["dead"]),
            (&json!(32), &json!(10), &json!(22)),
            "{shown}"
        );
        assert_eq!(totals["success_rate"], json!(0.3125), "{shown}");
        let sum: i64 = shown["series"].as_array().unwrap().iter().map(|one| one["attempts"].as_i64().unwrap()).sum();
        assert_eq!(sum, 32, "{shown}");
        let at = |name: &str| totals["latency_ms"][name].as_f64().unwrap();
        assert!(0.0 < at("p50") && at("p50") <= at("p95") && at("p95") <= at("p99"), "{shown}");
    }
    let shown = health(&manager, &healthy_one, "").await;
    assert_eq!((&shown["totals"]["success_rate"], &shown["totals"]["attempts"]), (&json!(1.0), &json!(32)), "{shown}");
    let shown = health(&manager, &idle, "").await;
    assert_eq!(
        (&shown["state"], &shown["totals"]["attempts"], &shown["series"]),
        (&json!("healthy"), &json!(0), &json!([]))
    );
    let rows: Vec<(i64,)> =
        sqlx::query_as("select count(distinct subscriber) from pillarbox_hub.health").fetch_all(db).await.unwrap();
    assert_eq!(rows, [(2,)], "nothing is written for a subscriber without attempts");

    assert_eq!(manager.send(Method::POST, &format!("{}/pause", subscriber_path(&idle)), None).await.status, 200);
    assert_eq!(health(&manager, &idle, "").await["state"], "paused");
    let change = Some(json!({"is_active": false}));
    assert_eq!(manager.send(Method::PATCH, &subscriber_path(&idle), change).await.status, 200);
    assert_eq!(health(&manager, &idle, "").await["state"], "disabled");
    let long = manager.get(&format!("{}/health?from=2020-01-01T00:00:00Z", subscriber_path(&idle))).await;
    long.assert_problem(400, "malformed-query");
    let reversed = "?from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z";
    let reversed = manager.get(&format!("{}/health{reversed}", subscriber_path(&idle))).await;
    reversed.assert_problem(400, "malformed-query");
    assert!(text(&reversed.json()["detail"]).contains("must be before `to`"), "{reversed:?}");
    let rival = caller(&app, "manage", "rival").await;
    let hidden = rival.get(&format!("{}/health", subscriber_path(&idle))).await;
    hidden.assert_problem(404, "subscriber-not-found");
    assert_eq!(text(&health(&manager, &idle, "").await["resolution"]), "hour");
    app.stop().await;
}

#[tokio::test]
async fn each_message_of_a_batch_is_an_attempt_and_a_recovery_is_reported_once_per_batch() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    // 20 requests fail, which opens the breaker; then all succeed.
    let mut requests = 0;
    let receiver = Receiver::with_reply(move |_| {
        requests += 1;
        Reply::status(if requests <= 20 { 503 } else { 200 })
    })
    .await;
    let fields =
        json!({"event_types": ["test.*"], "batch": {"max": 5}, "max_in_flight": 1, "retry_backoff_seconds": []});
    let subscriber = subscribe(&manager, &receiver.url(), fields).await;
    let set_paused = async |action: &str| {
        let path = format!("{}/{action}", subscriber_path(&subscriber));
        assert_eq!(manager.send(Method::POST, &path, None).await.status, 200);
    };
    set_paused("pause").await;
    // Some batches have several messages of one lane, some of several lanes.
    let ids = post_batch(&manager, numbered_events(3, 1..=50)).await;
    wait_for_outcome(&manager, &ids[149], &subscriber, "pending").await;
    set_paused("resume").await;
    // What the receiver has got of each status, by the header of each batch.
    let received = |status: u16| {
        let of_status = receiver.received().into_iter().filter(|request| request.status == status);
        of_status.map(|request| request.header("webhook-batch").parse::<i64>().unwrap()).sum::<i64>()
    };
    eventually("all are sent", DEADLINE, async || received(200) + received(503) == 150).await;
    wait_for_outcome(&manager, &ids[149], &subscriber, "delivered").await;
    wait_for_state(&manager, &subscriber, "healthy").await;
    assert!(receiver.count() < 75, "{} requests are no batches", receiver.count());
    app.stop().await;

    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let totals = health(&manager, &subscriber, "").await["totals"].clone();
    let counts = ["attempts", "delivered", "failed", "dead"].map(|name| totals[name].as_i64().unwrap());
    assert_eq!(counts, [150, received(200), 0, received(503)], "{totals}");
    let rows = "select count(*), count(distinct at), coalesce(sum(n), 0)::bigint from pillarbox_hub.health
                cross join lateral (select sum(one) as n from unnest(latency) as one) as all_ranges";
    let rows: (i64, i64, i64) = sqlx::query_as(rows).fetch_one(db).await.unwrap();
    assert!(rows.0 == rows.1 && rows.0 <= 2 && rows.2 == 150, "one row per minute, with every response time: {rows:?}");
    let reported = "select count(*) from pillarbox.log where topic = 'hub.subscriber.recovered'";
    assert_eq!(sqlx::query_scalar::<_, i64>(reported).fetch_one(db).await.unwrap(), 1, "once, not per message");
    app.stop().await;
}
