//! A restored copy of a database, and the webhooks that waited in it.

use runtime::secret::Secret;
use serde_json::json;
use server::settings::{Role, Settings};
use testkit::{Receiver, Reply, TestApp, TestDatabase, eventually};

use crate::consumers::support::copy_database;
use crate::hub::fixture::{Fixture, dead_letters, post, subscribe, wait_for_outcome, wait_for_webhooks};
use crate::operator::commands::Cli;
use crate::support::{DEADLINE, caller, text};

/// Sets the same key for the original and the copy, so that the copy can decrypt the secrets.
fn with_shared_key(settings: &mut Settings) {
    settings.secret_key = Some(Secret::new("MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=".to_owned()));
}

#[tokio::test]
async fn recover_skip_sends_none_of_the_waiting_webhooks() {
    let Fixture { database, app, manager } = Fixture::start_with(with_shared_key).await;
    let receiver =
        Receiver::with_reply(|received| Reply::status(if received.json()["bad"] == true { 503 } else { 200 })).await;
    let paused = subscribe(&manager, &receiver.url(), json!({"event_types": ["test.waits"]})).await;
    let pause = format!("/hub/v1/subscribers/{}/pause", text(&paused["id"]));
    assert_eq!(manager.post(&pause, json!({})).await.status, 200);
    let fields = json!({"event_types": ["test.fails"], "retry_backoff_seconds": [1, 1, 1, 1, 1, 1, 1, 1]});
    let failing = subscribe(&manager, &receiver.url(), fields).await;
    let refusing = Receiver::with_reply(|_| Reply::status(400)).await;
    let fields = json!({"event_types": ["test.blocks"], "on_exhausted": "block"});
    let blocking = subscribe(&manager, &refusing.url(), fields).await;
    let blocked = post(&manager, "test.blocks", json!({"n": 1}), Some("k")).await;
    wait_for_outcome(&manager, &blocked, &blocking, "dead").await;
    // The dispatcher delivered to a subscriber created after the pause, so it knows of the pause.
    for n in 1..=3 {
        post(&manager, "test.waits", json!({ "n": n }), Some("k")).await;
    }
    let behind = post(&manager, "test.blocks", json!({"n": 2}), Some("k")).await;
    wait_for_outcome(&manager, &behind, &blocking, "pending").await;
    let first = post(&manager, "test.fails", json!({"n": 1, "bad": true}), Some("k")).await;
    let second = post(&manager, "test.fails", json!({"n": 2}), Some("k")).await;
    wait_for_outcome(&manager, &first, &failing, "failed").await;
    wait_for_outcome(&manager, &second, &failing, "pending").await;
    app.stop().await;

    let copy = TestDatabase::empty().await;
    copy_database(&database, &copy);
    let app = TestApp::start_with(&copy, with_shared_key).await;
    let manager = caller(&app, "manage", "acme").await;
    let sent = receiver.count();
    let output = Cli::new(&copy).ok("recover --skip").await;
    assert!(output.contains("6 pending webhooks"), "{output}");
    // The position of the paused subscriber moved too; otherwise retention would keep the log for it.
    let behind_all = "select count(*) from pillarbox_hub.subscriber where exists (
                          select from pillarbox_hub.position
                          where position.subscriber = subscriber.id and n = (select max(n_to) from pillarbox_hub.fanout_batch))";
    let passed: i64 = sqlx::query_scalar(behind_all).fetch_one(copy.pool()).await.unwrap();
    assert_eq!(passed, 3);
    let resume = format!("/hub/v1/subscribers/{}/resume", text(&paused["id"]));
    assert_eq!(manager.post(&resume, json!({})).await.status, 200);
    // New events are delivered to both.
    let new = post(&manager, "test.waits", json!({"n": 4}), Some("k")).await;
    wait_for_outcome(&manager, &new, &paused, "delivered").await;
    let new = post(&manager, "test.fails", json!({"n": 3}), Some("k")).await;
    wait_for_outcome(&manager, &new, &failing, "delivered").await;
    assert_eq!(receiver.count(), sent + 2, "no webhook from before the copy");
    refusing.set_reply(|_| Reply::status(200));
    let new = post(&manager, "test.blocks", json!({"n": 3}), Some("k")).await;
    wait_for_outcome(&manager, &new, &blocking, "delivered").await;
    assert_eq!(refusing.count(), 2, "the one that blocked the lane, and the new one");
    wait_for_outcome(&manager, &second, &failing, "dead").await;
    for (subscriber, count) in [(&paused, 3), (&failing, 2)] {
        let dead = dead_letters(&manager, subscriber).await;
        assert_eq!(dead.len(), count);
        assert!(dead.iter().all(|dead| dead["reason"] == "manual" && dead["event_type"] != json!(null)), "{dead:?}");
    }
    // The dead letters hold the content: a retry sends it.
    let dead = dead_letters(&manager, &paused).await;
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead[0]["id"]));
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    wait_for_webhooks(&receiver, sent + 3).await;
    eventually("the retried webhook is received", DEADLINE, async || {
        receiver.received().last().unwrap().json()["n"] == 1
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn a_pending_retry_can_be_requested_again_after_recover_skip() {
    let Fixture { database, app, manager } = Fixture::start_with(with_shared_key).await;
    let receiver = Receiver::with_reply(|_| Reply::status(400)).await;
    let blocking = subscribe(&manager, &receiver.url(), json!({"on_exhausted": "block"})).await;
    let event = post(&manager, "test.blocks", json!({"n": 1}), Some("k")).await;
    wait_for_outcome(&manager, &event, &blocking, "dead").await;
    app.stop().await;
    let without_dispatcher = TestApp::start_with(&database, |settings| {
        with_shared_key(settings);
        settings.roles = vec![Role::Api, Role::Fanout];
    })
    .await;
    let manager = without_dispatcher.anonymous().bearer(manager.credential());
    let path = format!("/hub/v1/dead-letters/{}", text(&dead_letters(&manager, &blocking).await[0]["id"]));
    let retry = format!("{path}/retry");
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    let commands = "select count(*) from pillarbox_hub.command";
    eventually("the command is recorded", DEADLINE, async || {
        sqlx::query_scalar::<_, i64>(commands).fetch_one(database.pool()).await.unwrap() == 1
    })
    .await;
    without_dispatcher.stop().await;

    let copy = TestDatabase::empty().await;
    copy_database(&database, &copy);
    let app = TestApp::start_with(&copy, with_shared_key).await;
    let manager = caller(&app, "manage", "acme").await;
    Cli::new(&copy).ok("recover --skip").await;
    eventually("the retry is reported as not done", DEADLINE, async || {
        manager.get(&path).await.json()["manual_retry_at"].is_null()
    })
    .await;
    assert_eq!(receiver.count(), 1);
    receiver.set_reply(|_| Reply::status(200));
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    wait_for_webhooks(&receiver, 2).await;
    app.stop().await;
}
