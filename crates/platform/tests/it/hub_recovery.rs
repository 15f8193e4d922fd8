//! A copy of a database, and the webhooks that waited in it.

use kit::secret::Secret;
use pillarbox::settings::{Role, Settings};
use serde_json::json;
use testkit::{Receiver, Reply, TestApp, TestDatabase, drain};

use crate::consuming::copy_database;
use crate::hub_delivery::{PATIENCE, caller, post, subscribe, until_received};
use crate::hub_world::{World, dead_letters, text, until_outcome};
use crate::operator_commands::Desk;

/// 32 bytes: the copy opens what the original sealed.
fn same_key(settings: &mut Settings) {
    settings.secret_key = Some(Secret::new("MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=".to_owned()));
}

#[tokio::test]
async fn a_copy_that_skips_sends_none_of_the_webhooks_that_waited() {
    let World { database, app, manager } = World::start_with(same_key).await;
    let receiver =
        Receiver::replying(|received| Reply::status(if received.json()["bad"] == true { 503 } else { 200 })).await;
    let paused = subscribe(&manager, &receiver.url(), json!({"event_types": ["test.waits"]})).await;
    let pause = format!("/hub/v1/subscribers/{}/pause", text(&paused["id"]));
    assert_eq!(manager.post(&pause, json!({})).await.status, 200);
    let fields = json!({"event_types": ["test.fails"], "retry_backoff_seconds": [1, 1, 1, 1, 1, 1, 1, 1]});
    let failing = subscribe(&manager, &receiver.url(), fields).await;
    let refusing = Receiver::replying(|_| Reply::status(400)).await;
    let fields = json!({"event_types": ["test.blocks"], "on_exhausted": "block"});
    let blocking = subscribe(&manager, &refusing.url(), fields).await;
    let blocked = post(&manager, "test.blocks", json!({"n": 1}), Some("k")).await;
    until_outcome(&manager, &blocked, &blocking, "dead").await;
    // Who sends knows a later subscriber, and so the pause.
    for n in 1..=3 {
        post(&manager, "test.waits", json!({ "n": n }), Some("k")).await;
    }
    let behind = post(&manager, "test.blocks", json!({"n": 2}), Some("k")).await;
    until_outcome(&manager, &behind, &blocking, "pending").await;
    let first = post(&manager, "test.fails", json!({"n": 1, "bad": true}), Some("k")).await;
    let second = post(&manager, "test.fails", json!({"n": 2}), Some("k")).await;
    until_outcome(&manager, &first, &failing, "failed").await;
    until_outcome(&manager, &second, &failing, "pending").await;
    app.stop().await;

    let copy = TestDatabase::empty().await;
    copy_database(&database, &copy);
    let app = TestApp::start_with(&copy, same_key).await;
    let manager = caller(&app, "manage", "acme").await;
    let sent = receiver.count();
    let told = Desk::at(&copy).ok("recover --skip").await;
    assert!(told.contains("6 webhooks that waited"), "{told}");
    // Also for one that stays paused nothing waits, or the log would be kept for it.
    let behind_all = "select count(*) from pillarbox_hub.subscriber where exists (
                          select from pillarbox_hub.position
                          where position.subscriber = subscriber.id and n = (select max(n_to) from pillarbox_hub.fanned))";
    let passed: i64 = sqlx::query_scalar(behind_all).fetch_one(copy.pool()).await.unwrap();
    assert_eq!(passed, 3);
    let resume = format!("/hub/v1/subscribers/{}/resume", text(&paused["id"]));
    assert_eq!(manager.post(&resume, json!({})).await.status, 200);
    // What comes now goes, to both.
    let new = post(&manager, "test.waits", json!({"n": 4}), Some("k")).await;
    until_outcome(&manager, &new, &paused, "delivered").await;
    let new = post(&manager, "test.fails", json!({"n": 3}), Some("k")).await;
    until_outcome(&manager, &new, &failing, "delivered").await;
    assert_eq!(receiver.count(), sent + 2, "and nothing from before");
    refusing.reply(|_| Reply::status(200));
    let new = post(&manager, "test.blocks", json!({"n": 3}), Some("k")).await;
    until_outcome(&manager, &new, &blocking, "delivered").await;
    assert_eq!(refusing.count(), 2, "the one that blocked, and the new one");
    until_outcome(&manager, &second, &failing, "dead").await;
    for (subscriber, count) in [(&paused, 3), (&failing, 2)] {
        let dead = dead_letters(&manager, subscriber).await;
        assert_eq!(dead.len(), count);
        assert!(dead.iter().all(|dead| dead["reason"] == "manual" && dead["event_type"] != json!(null)), "{dead:?}");
    }
    // With their content: one can be sent on request.
    let dead = dead_letters(&manager, &paused).await;
    let retry = format!("/hub/v1/dead-letters/{}/retry", text(&dead[0]["id"]));
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    until_received(&receiver, sent + 3).await;
    drain("it is the first", PATIENCE, async || receiver.received().last().unwrap().json()["n"] == 1).await;
    app.stop().await;
}

#[tokio::test]
async fn a_retry_that_nobody_has_done_yet_can_be_asked_for_again_in_a_copy_that_skips() {
    let World { database, app, manager } = World::start_with(same_key).await;
    let receiver = Receiver::replying(|_| Reply::status(400)).await;
    let blocking = subscribe(&manager, &receiver.url(), json!({"on_exhausted": "block"})).await;
    let event = post(&manager, "test.blocks", json!({"n": 1}), Some("k")).await;
    until_outcome(&manager, &event, &blocking, "dead").await;
    app.stop().await;
    let asking = TestApp::start_with(&database, |settings| {
        same_key(settings);
        settings.roles = vec![Role::Api, Role::Fanout];
    })
    .await;
    let manager = asking.anyone().bearer(manager.credential());
    let path = format!("/hub/v1/dead-letters/{}", text(&dead_letters(&manager, &blocking).await[0]["id"]));
    let retry = format!("{path}/retry");
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    let commands = "select count(*) from pillarbox_hub.command";
    drain("it is asked for", PATIENCE, async || {
        sqlx::query_scalar::<_, i64>(commands).fetch_one(database.pool()).await.unwrap() == 1
    })
    .await;
    asking.stop().await;

    let copy = TestDatabase::empty().await;
    copy_database(&database, &copy);
    let app = TestApp::start_with(&copy, same_key).await;
    let manager = caller(&app, "manage", "acme").await;
    Desk::at(&copy).ok("recover --skip").await;
    drain("it was not retried", PATIENCE, async || manager.get(&path).await.json()["manual_retry_at"].is_null()).await;
    assert_eq!(receiver.count(), 1);
    receiver.reply(|_| Reply::status(200));
    assert_eq!(manager.post(&retry, json!({})).await.status, 202);
    until_received(&receiver, 2).await;
    app.stop().await;
}
