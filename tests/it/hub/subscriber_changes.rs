//! A subscriber is created, changed or deleted while events are posted.

use hyper::Method;
use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use server::settings::Role;
use testkit::{FaultProxy, Receiver, Reply, TestApp, TestDatabase, eventually};

use crate::hub::fixture::{
    Fixture, post, received_numbers, subscribe, subscriber_path, wait_for_outcome, wait_for_webhooks,
};
use crate::support::{DEADLINE, caller, text};

#[tokio::test]
async fn an_event_posted_right_after_its_subscriber_was_created_is_delivered() {
    let fixture = Fixture::start().await;
    for n in 0..20 {
        let receiver = Receiver::start().await;
        let event_type = format!("test.s{n}");
        subscribe(&fixture.manager, &receiver.url(), json!({"event_types": [event_type]})).await;
        let event_id = post(&fixture.manager, &event_type, json!({}), None).await;
        wait_for_webhooks(&receiver, 1).await;
        assert_eq!(receiver.received()[0].header("webhook-id"), event_id);
    }
    fixture.app.stop().await;
}

/// A dispatcher that has loaded a subscriber but no hub message yet learns of the first message and of another subscriber
/// in the same poll.
#[tokio::test]
async fn the_first_message_is_delivered_while_another_subscriber_is_created() {
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
    // The dispatcher polls for new messages only after it has loaded its subscribers.
    let polls = "select from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                and query like '%unnest(batch.subscribers)%'";
    eventually("the dispatcher polls for new messages", DEADLINE, async || has(polls).await).await;
    proxy.stall();
    for n in 1..=2 {
        post(&manager, "test.a", json!({ "n": n }), Some("lane")).await;
    }
    subscribe(&manager, &receiver.url(), json!({"event_types": ["test.b"]})).await;
    let made = "select from pillarbox_hub.fanout_batch where n_to = 2";
    eventually("the hub messages are created", DEADLINE, async || has(made).await).await;
    proxy.pass();
    wait_for_webhooks(&receiver, 2).await;
    dispatching.stop().await;
    app.stop().await;
    let numbers = received_numbers(&receiver);
    assert_eq!(numbers, [1, 2]);
}

#[tokio::test]
async fn the_next_attempt_of_waiting_messages_goes_to_the_new_url() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (old, new) = (Receiver::with_reply(|_| Reply::status(503)).await, Receiver::start().await);
    let subscriber = subscribe(manager, &old.url(), json!({"retry_backoff_seconds": [2, 2, 2]})).await;
    let first = post(manager, "test.a", json!({"n": 1}), Some("lane")).await;
    let second = post(manager, "test.a", json!({"n": 2}), Some("lane")).await;
    wait_for_outcome(manager, &first, &subscriber, "failed").await;
    let path = subscriber_path(&subscriber);
    let changed = manager.send(Method::PATCH, &path, Some(json!({"url": new.url()}))).await;
    assert_eq!(changed.status, 200, "{changed:?}");
    let third = post(manager, "test.a", json!({"n": 3}), Some("lane")).await;
    for event_id in [&first, &second, &third] {
        wait_for_outcome(manager, event_id, &subscriber, "delivered").await;
    }
    fixture.app.stop().await;
    assert_eq!(old.count(), 1, "only the attempt before the change");
    let numbers = received_numbers(&new);
    assert_eq!(numbers, [1, 2, 3]);
}

#[tokio::test]
async fn a_deleted_subscriber_receives_nothing_not_even_waiting_messages() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (deleted, other) = (Receiver::with_reply(|_| Reply::status(503)).await, Receiver::start().await);
    let subscriber = subscribe(manager, &deleted.url(), json!({"retry_backoff_seconds": [1, 1, 1]})).await;
    subscribe(manager, &other.url(), json!({})).await;
    let event_id = post(manager, "test.a", json!({}), Some("lane")).await;
    wait_for_outcome(manager, &event_id, &subscriber, "failed").await;
    let path = subscriber_path(&subscriber);
    assert_eq!(manager.delete(&path).await.status, 204);
    let before = deleted.count();
    let began = tokio::time::Instant::now();
    // Post matching events for longer than the backoff of its retry.
    let mut posted = 1;
    while began.elapsed() < std::time::Duration::from_millis(1_600) {
        post(manager, "test.a", json!({}), Some("lane")).await;
        posted += 1;
        wait_for_webhooks(&other, posted).await;
    }
    assert_eq!(deleted.count(), before, "nothing is sent after the deletion");
    let lanes = "select count(*) from pillarbox_hub.lane";
    let lanes = async || sqlx::query_scalar::<_, i64>(lanes).fetch_one(fixture.database.pool()).await.unwrap();
    eventually("its lanes are deleted", DEADLINE, async || lanes().await == 0).await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_subscriber_with_an_undecryptable_secret_waits_alone() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (locked_out, other) = (Receiver::start().await, Receiver::start().await);
    let made = subscribe(&manager, &locked_out.url(), json!({})).await;
    subscribe(&manager, &other.url(), json!({})).await;
    let swap = "with old as (select id, sealed from pillarbox_hub.secret where subscriber = $1::uuid)
                update pillarbox_hub.secret set sealed = coalesce($2, 'not ours'::bytea) from old where secret.id = old.id
                returning old.sealed";
    let replace_secret = async |sealed: Option<Vec<u8>>| -> Vec<u8> {
        sqlx::query_scalar(swap).bind(text(&made["id"])).bind(sealed).fetch_one(database.pool()).await.unwrap()
    };
    let sealed = replace_secret(None).await;
    // The dispatcher may have decrypted the secret before the update, so start a new one.
    app.stop().await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    for n in 1..=3 {
        post(&manager, "test.posted", json!({ "n": n }), Some("lane")).await;
    }
    wait_for_webhooks(&other, 3).await;
    assert_eq!(locked_out.count(), 0);
    let (list, path) = ("/hub/v1/subscribers", subscriber_path(&made));
    let listed = manager.get(list).await.json()["items"].as_array().unwrap().clone();
    let undecryptable: Vec<_> =
        listed.iter().filter(|one| one["unopened"] == true).map(|one| one["id"].clone()).collect();
    assert_eq!((listed.len(), undecryptable), (2, vec![made["id"].clone()]), "both are listed, and only one is marked");
    assert_eq!(manager.get(&path).await.json()["secrets"], json!([]));
    let changed = manager.post(&format!("{path}/pause"), json!({})).await;
    changed.assert_problem(409, "subscriber-unopened");
    replace_secret(Some(sealed)).await;
    wait_for_webhooks(&locked_out, 3).await;
    replace_secret(None).await;
    assert_eq!(manager.send(Method::DELETE, &path, None).await.status, 204, "deleting does not need the secret");
    manager.get(&path).await.assert_problem(404, "subscriber-not-found");
    app.stop().await;
    let numbers = received_numbers(&locked_out);
    assert_eq!(numbers, [1, 2, 3], "everything posted while it was locked out, in order");
}
