//! What the hub forgets, and what it must not.

use std::collections::BTreeSet;

use pillarbox::settings::Role;
use serde_json::json;
use sqlx::PgPool;
use testkit::{Receiver, Reply, TestApp, drain};

use crate::hub_delivery::{PATIENCE, caller, post, subscribe, until_received};
use crate::hub_people::{attempt, bury, make_message, post_event, start, subscriber};
use crate::hub_world::{World, text, until_outcome};

async fn found(db: &PgPool, query: &'static str) -> BTreeSet<i64> {
    sqlx::query_scalar(query).fetch_all(db).await.unwrap().into_iter().collect()
}

#[tokio::test]
async fn what_is_old_goes_but_not_what_waits() {
    let (database, app) = start().await;
    let db = database.pool();
    let manager = caller(&app, "manage", "acme").await;
    let (served, waiting) = (subscriber(&manager, "served").await, subscriber(&manager, "waiting").await);
    // Of each: 1 is old and settled, 2 is old and a lane waits for it, 3 is of now.
    let event = post_event(db, "acme", "order.paid", "{}").await;
    for (n, subscriber) in [(1, served), (2, waiting), (3, served)] {
        make_message(db, n, subscriber, event).await;
        attempt(db, subscriber, n, 1, if n == 3 { "delivered" } else { "dead" }, 200).await;
        bury(db, "acme", subscriber, n, (event, "order.paid"), "exhausted").await;
    }
    sqlx::raw_sql(
        "update pillarbox_hub.message set at = at - interval '100 days' where n in (1, 2);
         update pillarbox_hub.attempt set at = at - interval '100 days' where n in (1, 2);
         update pillarbox_hub.dead_letter set moved_to_dlq_at = moved_to_dlq_at - interval '100 days' where n in (1, 2)",
    )
    .execute(db)
    .await
    .unwrap();
    let passed = "insert into pillarbox_hub.position (subscriber, n, at) values ($1, 3, now()), ($2, 3, now())";
    sqlx::query(passed).bind(served).bind(waiting).execute(db).await.unwrap();
    // One that is paused has never been sent anything.
    let paused = subscriber(&manager, "paused").await;
    make_message(db, 4, paused, event).await;
    sqlx::raw_sql("update pillarbox_hub.message set at = at - interval '50 days' where n = 4")
        .execute(db)
        .await
        .unwrap();
    let blocked = "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, again) values ($1, 2, 'k', 4, null, false)";
    sqlx::query(blocked).bind(waiting).execute(db).await.unwrap();

    app.stop().await;
    let maintaining = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    let dead_letters = "select n from pillarbox_hub.dead_letter";
    drain("the old dead letter is gone", PATIENCE, async || found(db, dead_letters).await == BTreeSet::from([2, 3]))
        .await;
    let (messages, attempts) = ("select n from pillarbox_hub.message", "select n from pillarbox_hub.attempt");
    drain("what is settled is gone", PATIENCE, async || match found(db, messages).await {
        left if left == BTreeSet::from([2, 3, 4]) => Ok(()),
        other => Err(other),
    })
    .await;
    let carried = "select n from pillarbox_hub.message where at > now() - interval '1 day'";
    assert_eq!(found(db, carried).await, BTreeSet::from([2, 3, 4]), "what waits holds up no day");
    drain("old attempts are gone", PATIENCE, async || found(db, attempts).await == BTreeSet::from([3])).await;
    maintaining.stop().await;

    sqlx::raw_sql(
        "delete from pillarbox_hub.lane;
         update pillarbox_hub.message set at = at - interval '100 days' where n = 2",
    )
    .execute(db)
    .await
    .unwrap();
    let maintaining = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    drain("all that is old is gone", PATIENCE, async || {
        let mut left = Vec::new();
        for query in [dead_letters, messages, attempts] {
            left.push(found(db, query).await);
        }
        if left == [3, 4, 3].map(|last| BTreeSet::from([3, last])) { Ok(()) } else { Err(left) }
    })
    .await;
    maintaining.stop().await;
}

#[tokio::test]
async fn what_waited_for_longer_than_messages_are_kept_goes_once_it_may() {
    let World { database, app, manager } = World::start().await;
    let db = database.pool();
    let receiver =
        Receiver::replying(|received| Reply::status(if received.json()["n"] == 2 { 503 } else { 200 })).await;
    let made = subscribe(&manager, &receiver.url(), json!({"retry_backoff_seconds": [3600]})).await;
    let path = |what: &str| format!("/hub/v1/subscribers/{}/{what}", text(&made["id"]));
    // One is delivered, one is to be tried again, one waits behind it, and one waits because nothing is sent.
    let mut events = Vec::new();
    for (n, lane) in [(1, "a"), (2, "b"), (3, "b")] {
        events.push(post(&manager, "test.posted", json!({ "n": n }), Some(lane)).await);
    }
    until_outcome(&manager, &events[1], &made, "failed").await;
    until_outcome(&manager, &events[0], &made, "delivered").await;
    assert_eq!(manager.post(&path("pause"), json!({})).await.status, 200);
    events.push(post(&manager, "test.posted", json!({"n": 4}), Some("a")).await);
    until_outcome(&manager, &events[3], &made, "pending").await;
    app.stop().await;
    sqlx::raw_sql(
        "update pillarbox_hub.message set at = at - interval '20 days';
         update pillarbox_hub.position set at = at - interval '20 days';
         update pillarbox_hub.lane set next_at = now()",
    )
    .execute(db)
    .await
    .unwrap();
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let messages = "select n from pillarbox_hub.message";
    drain("what is settled is gone", PATIENCE, async || found(db, messages).await == BTreeSet::from([2, 3, 4])).await;
    until_outcome(&manager, &events[1], &made, "failed").await;
    assert_eq!(receiver.count(), 2);
    assert_eq!(manager.post(&path("resume"), json!({})).await.status, 200);
    // The second fails again, for the last time; the third is free then.
    until_received(&receiver, 5).await;
    until_outcome(&manager, &events[1], &made, "dead").await;
    for event in &events[2..] {
        until_outcome(&manager, event, &made, "delivered").await;
    }
    app.stop().await;
    assert_eq!(receiver.count(), 5, "and the first was not sent again");
}
