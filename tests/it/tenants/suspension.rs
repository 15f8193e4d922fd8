//! A suspended tenant sends and receives nothing, and loses nothing.

use std::ops::RangeInclusive;

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Received, Receiver, TestApp, TestDatabase, eventually};

use crate::delivery::fixture::{insert_contact, insert_due, set_event_type, wait_for_state};
use crate::hub::fixture::{Fixture, numbered_events, post, post_batch, subscribe, wait_for_webhooks};
use crate::hub::stream_fixture::{acknowledge, create_stream, items, numbers, pull, pull_count, send};
use crate::server::api::{filled, operations};
use crate::support::{DEADLINE, caller, text};

async fn set(admin: &Client, action: &str) {
    let answer = admin.send(Method::POST, &format!("/admin/v1/tenants/acme/{action}"), None).await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

/// Posts numbers in SQL, in the lane of the numbered events.
async fn post_in_sql(db: &PgPool, numbers: RangeInclusive<i64>) {
    for n in numbers {
        let post = "select pillarbox.post('test.numbered', json_build_object('n', $1::bigint), key => 'lane-0', tenant => 'acme')";
        sqlx::query(post).bind(n).execute(db).await.expect("a business transaction does not fail");
    }
}

/// The numbers in webhooks of this kind, in the order of their arrival.
fn numbers_received(receiver: &Receiver, is_replay: bool) -> Vec<u64> {
    let of_kind = |one: &&Received| one.headers.contains_key("webhook-replay") == is_replay;
    receiver.received().iter().filter(of_kind).filter_map(|one| one.json()["n"].as_u64()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_tenant_sends_and_receives_nothing_and_loses_nothing() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, admin, receiver, sentinel) =
        (database.pool(), app.admin(), Receiver::start().await, Receiver::start().await);
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    create_stream(&manager, json!({})).await;
    let other = caller(&app, "manage", "other").await;
    subscribe(&other, &sentinel.url(), json!({})).await;
    set_event_type(&app, "order.paid", json!({"channels": ["webhook"]})).await;
    let user = insert_contact(db, None, Some("acme")).await;
    post_batch(&manager, numbered_events(1, 1..=20)).await;
    wait_for_webhooks(&receiver, 20).await;
    let pulled = pull_count(&manager, "worker", 20).await;
    acknowledge(&manager, "worker", &pulled).await;
    // A replay has sent the first of its messages, and a pull waits.
    let from = (chrono::Utc::now() - chrono::TimeDelta::hours(1)).to_rfc3339();
    let replay = manager.post("/hub/v1/replays", json!({"from": from, "rate_per_second": 10})).await;
    assert_eq!(replay.status, 202, "{replay:?}");
    wait_for_webhooks(&receiver, 21).await;
    let waiting = manager.clone();
    let waiting = tokio::spawn(async move {
        send(&waiting, "pull", json!({"reader": "worker", "wait_ms": 20_000, "lease_seconds": 300})).await
    });
    eventually("the pull waits", DEADLINE, async || {
        let readers = "select count(*) from pillarbox_hub.stream_reader where lease_until > now() + interval '200 s'";
        sqlx::query_scalar::<_, i64>(readers).fetch_one(db).await.unwrap() == 1
    })
    .await;

    set(&admin, "suspend").await;
    post_in_sql(db, 21..=60).await;
    waiting.await.unwrap().assert_problem(403, "tenant-suspended");
    let sent_before = receiver.count();
    let notification = insert_due(db, user, "webhook", "order.paid", 0).await;
    wait_for_state(db, notification, "delivered").await;
    // An event that the other tenant posts now is dispatched after the events above.
    post(&other, "test.sentinel", json!({}), None).await;
    wait_for_webhooks(&sentinel, 1).await;
    let acting = admin.with_header("pillarbox-tenant", "acme");
    let id = text(&subscriber["id"]);
    let path = format!("/hub/v1/messages?subscriber_id={id}&outcome=pending&limit=100");
    // All live messages, and some of the replay.
    eventually("all wait", DEADLINE, async || match acting.get(&path).await.json()["items"].as_array().map(Vec::len) {
        Some(41..) => Ok(()),
        other => Err(other),
    })
    .await;
    let test = format!("/hub/v1/subscribers/{id}/test");
    acting.send(Method::POST, &test, None).await.assert_problem(403, "tenant-suspended");
    let pull = json!({"reader": "operator"});
    send(&acting, "pull", pull).await.assert_problem(403, "tenant-suspended");
    assert_eq!(receiver.count(), sent_before, "nothing is sent while the tenant is suspended");

    set(&admin, "resume").await;
    wait_for_webhooks(&receiver, 81).await;
    assert_eq!(numbers_received(&receiver, false), (1..=60).collect::<Vec<_>>(), "each once and in order");
    assert_eq!(numbers_received(&receiver, true), (1..=20).collect::<Vec<_>>(), "and the replay");
    let received = receiver.received();
    assert!(received.iter().any(|one| one.json()["event_type"] == "order.paid"), "the notification also arrives");
    let pulled = pull_count(&manager, "worker", 41).await;
    let pulled: Vec<u64> = items(&pulled).iter().filter_map(|item| item["payload"]["n"].as_u64()).collect();
    assert_eq!(pulled, (21..=60).collect::<Vec<_>>(), "the stream has everything in order");
    post(&manager, "test.numbered", json!({"n": 61}), Some("lane-0")).await;
    wait_for_webhooks(&receiver, 82).await;
    app.stop().await;
}

#[tokio::test]
async fn every_hub_route_refuses_a_suspended_tenant_and_serves_the_operator() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let admin = app.admin();
    let token = manager.post("/hub/v1/portal-tokens", json!({"access": "manage"})).await.json();
    let portal = app.anonymous().bearer(token["token"].as_str().unwrap());
    set(&admin, "suspend").await;
    let mut refused = 0;
    for (method, path, _) in operations(&app.anonymous()).await {
        if path != "/events" && !path.starts_with("/hub/v1/") {
            continue;
        }
        refused += 1;
        for client in [&manager, &portal] {
            let answer = client.send(method.clone(), &filled(&path), Some(json!({}))).await;
            answer.assert_problem(403, "tenant-suspended");
        }
    }
    assert!(refused > 20, "{refused}");
    manager.get("/admin/v1/keys").await.assert_problem(403, "tenant-suspended");
    let acting = admin.with_header("pillarbox-tenant", "acme");
    assert_eq!(acting.get("/hub/v1/subscribers").await.status, 200);
    let receiver = Receiver::start().await;
    let made: Value = subscribe(&acting, &receiver.url(), json!({"verify_endpoint": true})).await;
    let path = format!("/hub/v1/subscribers/{}", text(&made["id"]));
    acting.send(Method::POST, &format!("{path}/verify"), None).await.assert_problem(403, "tenant-suspended");
    assert_eq!(acting.delete(&path).await.status, 204);
    assert_eq!(receiver.count(), 0, "no challenge is sent");
    let event = json!({"event_type": "order.paid", "payload": {}});
    acting.post("/hub/v1/events", event).await.assert_problem(403, "tenant-suspended");
    set(&admin, "resume").await;
    assert_eq!(manager.get("/hub/v1/subscribers").await.status, 200);
    app.stop().await;
}

/// A suspension that was answered holds in every process: no dispatcher sends, and no cached key is accepted.
#[tokio::test(flavor = "multi_thread")]
async fn a_suspension_is_effective_in_every_process_when_it_is_answered() {
    let database = TestDatabase::new(&migrations()).await;
    let apps = [TestApp::start(&database).await, TestApp::start(&database).await];
    let manager = caller(&apps[0], "manage", "acme").await;
    let elsewhere = Client::new(apps[1].anonymous().base()).bearer(manager.credential());
    let receiver = Receiver::start().await;
    for _ in 0..8 {
        subscribe(&manager, &receiver.url(), json!({"event_types": ["test.*"]})).await;
    }
    post(&elsewhere, "test.numbered", json!({"n": 1}), None).await;
    wait_for_webhooks(&receiver, 8).await;
    set(&apps[0].admin(), "suspend").await;
    for client in [&manager, &elsewhere] {
        client.get("/hub/v1/subscribers").await.assert_problem(403, "tenant-suspended");
    }
    let other = caller(&apps[1], "manage", "other").await;
    let sentinel = Receiver::start().await;
    subscribe(&other, &sentinel.url(), json!({})).await;
    let post_in_sql = "select pillarbox.post('test.numbered', '{\"n\": 2}', tenant => 'acme')";
    sqlx::query(post_in_sql).execute(database.pool()).await.unwrap();
    post(&other, "test.sentinel", json!({}), None).await;
    wait_for_webhooks(&sentinel, 1).await;
    assert_eq!(receiver.count(), 8, "nothing is sent by either process");
    set(&apps[0].admin(), "resume").await;
    assert_eq!(elsewhere.get("/hub/v1/subscribers").await.status, 200);
    wait_for_webhooks(&receiver, 16).await;
    for app in apps {
        app.stop().await;
    }
}

/// Neither its own readers, nor an operator for it, nor a pull that waited when it was suspended.
#[tokio::test(flavor = "multi_thread")]
async fn no_caller_pulls_a_stream_of_a_suspended_tenant_and_no_message_is_lost() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, admin) = (database.pool(), app.admin());
    create_stream(&manager, json!({})).await;
    post(&manager, "test.numbered", json!({"n": 1}), Some("key")).await;
    let first = pull_count(&manager, "a", 1).await;
    let waiting = tokio::spawn({
        let manager = manager.clone();
        let body = json!({"reader": "a", "acknowledge": first["cursor"], "wait_ms": 20_000});
        async move { send(&manager, "pull", body).await }
    });
    eventually("the pull waits", DEADLINE, async || {
        admin.with_header("pillarbox-tenant", "acme").get("/hub/v1/streams/orders").await.json()["lag"]["messages"] == 0
    })
    .await;
    set(&admin, "suspend").await;
    let post_in_sql = "select pillarbox.post('test.numbered', '{\"n\": 2}', key => 'key', tenant => 'acme')";
    sqlx::query(post_in_sql).execute(db).await.unwrap();
    waiting.await.unwrap().assert_problem(403, "tenant-suspended");
    let acting = admin.with_header("pillarbox-tenant", "acme");
    for client in [&acting, &manager] {
        send(client, "pull", json!({"reader": "a"})).await.assert_problem(403, "tenant-suspended");
    }
    assert_eq!(
        acting.get("/hub/v1/streams/orders").await.json()["lag"]["messages"],
        1,
        "the operator sees that it waits"
    );
    set(&admin, "resume").await;
    assert_eq!(numbers(&pull(&manager, json!({"reader": "a", "wait_ms": 10_000})).await), [2]);
    app.stop().await;
}
