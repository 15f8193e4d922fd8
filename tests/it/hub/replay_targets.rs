//! Replays whose subscribers or tenants change on the way: nothing is lost, and nothing waits for ever.

use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Received, Receiver, Reply};

use crate::hub::fixture::{
    Fixture, dead_letters, numbered_events, patch_subscriber, post, post_batch, subscribe, subscriber_path,
    wait_for_dead_letters, wait_for_outcome, wait_for_webhooks,
};
use crate::hub::replays::{check_sum, hour_ago, is_delivered, lanes_of, request_replay, show_replay, wait_for_replay};
use crate::support::{caller, text, uuid_of};

/// What the path of this name has received.
fn received_at(receiver: &Receiver, path: &str) -> Vec<Received> {
    receiver.received().into_iter().filter(|request| request.path.ends_with(path)).collect()
}

async fn change_subscriber(manager: &Client, subscriber: &Value, change: Value) {
    let changed = patch_subscriber(manager, uuid_of(&subscriber["id"]), change).await;
    assert_eq!(changed.status, 200, "{changed:?}");
}

#[tokio::test]
async fn a_replay_waits_for_a_subscriber_that_is_switched_off_and_ends_with_a_deleted_one() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let receiver = Receiver::start().await;
    let url = |name: &str| format!("{}/{name}", receiver.url());
    let (first, second) =
        (subscribe(&manager, &url("first"), json!({})).await, subscribe(&manager, &url("second"), json!({})).await);
    post_batch(&manager, numbered_events(2, 1..=100)).await;
    wait_for_webhooks(&receiver, 400).await;
    let stream = manager.post("/hub/v1/streams", json!({"name": "all", "event_types": ["*"]})).await;
    assert_eq!(stream.status, 201, "{stream:?}");

    change_subscriber(&manager, &first, json!({"is_active": false})).await;
    let one = request_replay(&manager, json!({"subscriber_id": first["id"], "from": hour_ago()})).await;
    let waits = |shown: &Value| shown["waits_for"] == first["id"];
    let shown = wait_for_replay(&manager, &one, "it waits for the subscriber", waits).await;
    assert_eq!((&shown["state"], &shown["created"]), (&json!("running"), &json!(0)));
    let all = request_replay(&manager, json!({"from": hour_ago()})).await;
    let shown = wait_for_replay(&manager, &all, "a replay for all does not wait", is_delivered).await;
    assert_eq!(shown["created"], 200, "neither the inactive subscriber nor a stream gets anything");
    change_subscriber(&manager, &first, json!({"is_active": true})).await;
    let shown = wait_for_replay(&manager, &one, "it continues", is_delivered).await;
    assert_eq!(shown["created"], 200);
    let lanes = lanes_of(&received_at(&receiver, "/first"), one["id"].as_str());
    assert!(lanes.len() == 2 && lanes.values().all(|lane| *lane == (1..=100).collect::<Vec<_>>()), "{lanes:?}");

    // Both have messages that are not sent when the second subscriber is deleted.
    for subscriber in [&first, &second] {
        assert_eq!(manager.post(&format!("{}/pause", subscriber_path(subscriber)), json!({})).await.status, 200);
    }
    let all = request_replay(&manager, json!({"from": hour_ago()})).await;
    wait_for_replay(&manager, &all, "messages wait at both", |shown| shown["waiting"] == 400).await;
    let one = request_replay(&manager, json!({"subscriber_id": second["id"], "from": hour_ago()})).await;
    let deleted = manager.delete(&subscriber_path(&second)).await;
    assert_eq!(deleted.status, 204, "{deleted:?}");
    let failed = wait_for_replay(&manager, &one, "its subscriber is deleted", |shown| shown["state"] == "failed").await;
    assert!(text(&failed["error"]).contains("was deleted"), "{failed}");
    assert_eq!(manager.post(&format!("{}/resume", subscriber_path(&first)), json!({})).await.status, 200);
    let shown = wait_for_replay(&manager, &all, "the other one gets everything", is_delivered).await;
    check_sum(&shown);
    assert_eq!((&shown["delivered"], &shown["dropped"]), (&json!(200), &json!(200)));
    app.stop().await;
    drop(database);
}

#[tokio::test]
async fn a_replay_outlasts_the_suspension_of_its_tenant_and_ends_with_the_tenant() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let (admin, receiver) = (app.admin(), Receiver::start().await);
    subscribe(&manager, &receiver.url(), json!({})).await;
    // More than may wait at a subscriber.
    for events in [1..=250, 251..=500] {
        post_batch(&manager, numbered_events(4, events)).await;
    }
    wait_for_webhooks(&receiver, 2_000).await;
    let change_tenant = async |action: &str| {
        let answer = admin.send(Method::POST, &format!("/admin/v1/tenants/acme/{action}"), None).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    let body = json!({"from": hour_ago(), "rate_per_second": 100});
    let replay = request_replay(&manager, body.clone()).await;
    wait_for_replay(&manager, &replay, "it has begun", |shown| shown["delivered"].as_u64() > Some(0)).await;
    change_tenant("suspend").await;
    let sent = receiver.count();
    let unlimited = "update pillarbox_hub.replay set rate_per_second = null";
    sqlx::query(unlimited).execute(database.pool()).await.unwrap();
    let acting = admin.with_header("pillarbox-tenant", "acme");
    let waits = |shown: &Value| shown.get("waits_for").is_some();
    let shown = wait_for_replay(&acting, &replay, "too many messages wait", waits).await;
    check_sum(&shown);
    assert_eq!(receiver.count(), sent, "nothing is sent to a suspended tenant");
    change_tenant("resume").await;
    let shown = wait_for_replay(&acting, &replay, "it continues", is_delivered).await;
    assert_eq!(shown["delivered"], 2_000);
    let lanes = lanes_of(&receiver.received(), replay["id"].as_str());
    assert!(lanes.values().all(|lane| *lane == (1..=500).collect::<Vec<_>>()), "{lanes:?}");

    let replay = request_replay(&acting, body).await;
    wait_for_replay(&acting, &replay, "it has begun", |shown| shown["delivered"].as_u64() > Some(0)).await;
    change_tenant("suspend").await;
    assert_eq!(admin.delete("/admin/v1/tenants/acme").await.status, 204);
    let query = "select count(*) from pillarbox_hub.replay where tenant = 'acme'";
    let left: i64 = sqlx::query_scalar(query).fetch_one(database.pool()).await.unwrap();
    assert_eq!(left, 0, "the replay is deleted with the tenant");
    // Fan-out is not held up by what is left of it.
    let other = caller(&app, "manage", "other").await;
    let sentinel = Receiver::start().await;
    subscribe(&other, &sentinel.url(), json!({})).await;
    post(&other, "test.sentinel", json!({"lane": "-", "n": 1}), None).await;
    wait_for_webhooks(&sentinel, 1).await;
    let replay = request_replay(&other, json!({"from": hour_ago()})).await;
    wait_for_replay(&other, &replay, "replays of others go on", is_delivered).await;
    app.stop().await;
}

#[tokio::test]
async fn a_backfill_waits_for_its_endpoint_to_be_verified_and_for_its_subscriber_to_be_active() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let receiver = Receiver::with_reply(|_| Reply::status(404)).await;
    let first = Receiver::start().await;
    subscribe(&manager, &first.url(), json!({})).await;
    post_batch(&manager, numbered_events(1, 1..=30)).await;
    wait_for_webhooks(&first, 30).await;
    let fields = json!({"backfill": {"from": hour_ago()}, "verify_endpoint": true, "is_active": false});
    let subscriber = subscribe(&manager, &format!("{}/new", receiver.url()), fields).await;
    post_batch(&manager, numbered_events(1, 31..=40)).await;
    wait_for_webhooks(&first, 40).await;
    let path = format!("/hub/v1/replays?subscriber_id={}", text(&subscriber["id"]));
    let backfill = manager.get(&path).await.json()["items"][0].clone();
    let waits = |shown: &Value| shown["waits_for"] == subscriber["id"];
    wait_for_replay(&manager, &backfill, "it waits for an active subscriber", waits).await;
    change_subscriber(&manager, &subscriber, json!({"is_active": true})).await;
    let shown = wait_for_replay(&manager, &backfill, "its messages wait", |shown| shown["state"] == "finished").await;
    assert_eq!((&shown["created"], &shown["waiting"]), (&json!(40), &json!(40)), "the events of the meantime as well");
    receiver.set_reply(|request| Reply { body: String::from_utf8_lossy(&request.body).into(), ..Reply::status(200) });
    let verified = manager.post(&format!("{}/verify", subscriber_path(&subscriber)), json!({})).await;
    assert_eq!(verified.json()["verified"], true, "{verified:?}");
    wait_for_replay(&manager, &backfill, "they are sent", is_delivered).await;
    let webhooks: Vec<Received> = received_at(&receiver, "/new")
        .into_iter()
        .filter(|request| request.headers.contains_key("webhook-replay"))
        .collect();
    assert_eq!(lanes_of(&webhooks, backfill["id"].as_str())["lane-0"], (1..=40).collect::<Vec<_>>());
    app.stop().await;
    drop(database);
}

#[tokio::test]
async fn a_live_lane_that_is_named_like_the_lane_of_a_replay_is_a_live_lane() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let receiver =
        Receiver::with_reply(|request| Reply::status(if request.json()["n"] == 3 { 400 } else { 200 })).await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    let key = format!("replay:{}:x", text(&subscriber["id"]));
    let mut ids = Vec::new();
    for n in 1..=3 {
        ids.push(post(&manager, "test.named", json!({"lane": "x", "n": n}), Some(&key)).await);
    }
    let keyless = post(&manager, "test.named", json!({"lane": "-", "n": 3}), None).await;
    let outcome = wait_for_outcome(&manager, &ids[1], &subscriber, "delivered").await;
    let message = manager.get(&format!("/hub/v1/messages/{}", text(&outcome["message_id"]))).await.json();
    assert_eq!((&message["lane"], &message["seq"], message.get("replay_id")), (&json!(key), &json!(2), None));
    let dead = wait_for_dead_letters(&manager, &subscriber, 2).await;
    let named = dead.iter().find(|dead| dead["event_id"] == ids[2]).unwrap();
    assert_eq!((&named["lane"], named.get("replay_id")), (&json!(key), None));
    receiver.set_reply(|_| Reply::status(200));
    let retried = manager.post(&format!("/hub/v1/dead-letters/{}/retry", text(&named["id"])), json!({})).await;
    assert!(retried.status < 300, "{retried:?}");
    wait_for_webhooks(&receiver, 5).await;
    let last = receiver.received().remove(4);
    let header = |name: &str| last.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    assert_eq!(header("webhook-lane"), Some(key.clone()));
    assert_eq!(
        (header("webhook-seq").as_deref(), header("webhook-replay")),
        (Some("4"), None),
        "the retry is live, too"
    );

    // And the other way round: the retry of a message of a replay belongs to the replay, and counts once.
    receiver.set_reply(|request| Reply::status(if request.json()["lane"] == "-" { 400 } else { 200 }));
    let replay = request_replay(&manager, json!({"event_ids": [ids[0], keyless]})).await;
    let shown = wait_for_replay(&manager, &replay, "one is dead", is_delivered).await;
    assert_eq!((&shown["delivered"], &shown["dead"]), (&json!(1), &json!(1)));
    let dead = dead_letters(&manager, &subscriber).await;
    let replayed = dead.iter().find(|dead| dead["replay_id"] == replay["id"]).unwrap();
    receiver.set_reply(|_| Reply::status(200));
    manager.post(&format!("/hub/v1/dead-letters/{}/retry", text(&replayed["id"])), json!({})).await;
    let shown = wait_for_replay(&manager, &replay, "the retry is delivered", |shown| shown["delivered"] == 2).await;
    check_sum(&shown);
    assert_eq!((&shown["dead"], &shown["waiting"]), (&json!(0), &json!(0)));
    let last = receiver.received().pop().unwrap();
    assert_eq!(last.header("webhook-replay"), text(&replay["id"]));
    assert_eq!(show_replay(&manager, &replay).await["state"], "finished");
    app.stop().await;
    drop(database);
}
