//! A subscriber that is made, changed or deleted while events come.

use hyper::Method;
use kit::secret::Secret;
use mailbox::database::migrations;
use pillarbox::settings::Role;
use serde_json::json;
use testkit::{FaultProxy, Receiver, Reply, TestApp, TestDatabase, drain};

use crate::hub_delivery::{PATIENCE, caller, post, subscribe, until_received};
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

/// A dispatcher that knows a subscriber, and no message yet, hears of the first message and of another subscriber at once.
#[tokio::test]
async fn the_first_message_of_all_is_delivered_also_when_another_subscriber_is_made_meanwhile() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Fanout]).await;
    let manager = caller(&app, "manage", "acme").await;
    let receiver = Receiver::start().await;
    subscribe(&manager, &receiver.url(), json!({"event_types": ["test.a"]})).await;
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let dispatching = TestApp::start_with(&database, |settings| {
        settings.roles = vec![Role::Dispatch];
        settings.database_url = Some(Secret::new(proxy.url(&database.url())));
    })
    .await;
    let has = async |condition: &str| {
        let query = format!("select exists ({condition})");
        sqlx::query_scalar::<_, bool>(sqlx::AssertSqlSafe(query)).fetch_one(database.pool()).await.unwrap()
    };
    // It asks for news only when it knows its subscribers.
    let asks = "select from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                and query like '%unnest(fanned.subscribers)%'";
    drain("it asks for news", PATIENCE, async || has(asks).await).await;
    proxy.stall();
    for n in 1..=2 {
        post(&manager, "test.a", json!({ "n": n }), Some("lane")).await;
    }
    subscribe(&manager, &receiver.url(), json!({"event_types": ["test.b"]})).await;
    let made = "select from pillarbox_hub.fanned where n_to = 2";
    drain("the messages are made", PATIENCE, async || has(made).await).await;
    proxy.pass();
    until_received(&receiver, 2).await;
    dispatching.stop().await;
    app.stop().await;
    let numbers: Vec<_> = receiver.received().iter().map(|received| received.json()["n"].clone()).collect();
    assert_eq!(numbers, [1, 2]);
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

#[tokio::test]
async fn one_whose_secret_cannot_be_opened_waits_and_holds_up_nobody() {
    let World { database, app, manager } = World::start().await;
    let (locked_out, other) = (Receiver::start().await, Receiver::start().await);
    let made = subscribe(&manager, &locked_out.url(), json!({})).await;
    subscribe(&manager, &other.url(), json!({})).await;
    let swap = "with old as (select id, sealed from pillarbox_hub.secret where subscriber = $1::uuid)
                update pillarbox_hub.secret set sealed = coalesce($2, 'not ours'::bytea) from old where secret.id = old.id
                returning old.sealed";
    let seal = async |sealed: Option<Vec<u8>>| -> Vec<u8> {
        sqlx::query_scalar(swap).bind(text(&made["id"])).bind(sealed).fetch_one(database.pool()).await.unwrap()
    };
    let sealed = seal(None).await;
    // Who sends may have opened it before that.
    app.stop().await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    for n in 1..=3 {
        post(&manager, "test.posted", json!({ "n": n }), Some("lane")).await;
    }
    until_received(&other, 3).await;
    assert_eq!(locked_out.count(), 0);
    let (list, path) = ("/hub/v1/subscribers", format!("/hub/v1/subscribers/{}", text(&made["id"])));
    let listed = manager.get(list).await.json()["items"].as_array().unwrap().clone();
    let unopened: Vec<_> = listed.iter().filter(|one| one["unopened"] == true).map(|one| one["id"].clone()).collect();
    assert_eq!((listed.len(), unopened), (2, vec![made["id"].clone()]), "it is seen, and the other one, too");
    assert_eq!(manager.get(&path).await.json()["secrets"], json!([]));
    let changed = manager.post(&format!("{path}/pause"), json!({})).await;
    changed.assert_problem(409, "subscriber-unopened");
    seal(Some(sealed)).await;
    until_received(&locked_out, 3).await;
    seal(None).await;
    assert_eq!(manager.send(Method::DELETE, &path, None).await.status, 204, "without being opened");
    manager.get(&path).await.assert_problem(404, "subscriber-not-found");
    app.stop().await;
    let numbers: Vec<_> = locked_out.received().iter().map(|received| received.json()["n"].clone()).collect();
    assert_eq!(numbers, [1, 2, 3], "all that came meanwhile, in order");
}
