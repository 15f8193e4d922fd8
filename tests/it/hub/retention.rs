//! Retention of the hub's tables: what is deleted, what must stay, and the gauges of what waits.

use std::collections::BTreeSet;

use serde_json::json;
use server::migrations;
use server::settings::Role;
use sqlx::PgPool;
use testkit::{Receiver, Reply, TestApp, TestDatabase, eventually};

use crate::hub::fixture::{Fixture, post, subscribe, wait_for_dead_letters, wait_for_outcome, wait_for_webhooks};
use crate::hub::process::Replica;
use crate::hub::rows::{
    create_subscriber, insert_attempt, insert_dead_letter, insert_event, insert_message, start_api_only,
};
use crate::support::{DEADLINE, caller, text};

async fn numbers(db: &PgPool, query: &'static str) -> BTreeSet<i64> {
    sqlx::query_scalar(query).fetch_all(db).await.unwrap().into_iter().collect()
}

#[tokio::test]
async fn old_rows_are_deleted_unless_something_waits_for_them() {
    let (database, app) = start_api_only().await;
    let db = database.pool();
    let manager = caller(&app, "manage", "acme").await;
    let (served, waiting) = (create_subscriber(&manager, "served").await, create_subscriber(&manager, "waiting").await);
    // 1 is old and complete, 2 is old and a lane waits for it, 3 is new.
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    for (n, subscriber) in [(1, served), (2, waiting), (3, served)] {
        insert_message(db, n, subscriber, event).await;
        insert_attempt(db, subscriber, n, 1, if n == 3 { "delivered" } else { "dead" }, 200).await;
        insert_dead_letter(db, "acme", subscriber, n, (event, "order.paid"), "exhausted").await;
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
    // A paused subscriber that has never been sent anything.
    let paused = create_subscriber(&manager, "paused").await;
    insert_message(db, 4, paused, event).await;
    sqlx::raw_sql("update pillarbox_hub.message set at = at - interval '50 days' where n = 4")
        .execute(db)
        .await
        .unwrap();
    let blocked = "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, manual_retry) values ($1, 2, 'k', 4, null, false)";
    sqlx::query(blocked).bind(waiting).execute(db).await.unwrap();

    app.stop().await;
    let maintaining = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    let dead_letters = "select n from pillarbox_hub.dead_letter";
    eventually("the old dead letter is deleted", DEADLINE, async || {
        numbers(db, dead_letters).await == BTreeSet::from([2, 3])
    })
    .await;
    let (messages, attempts) = ("select n from pillarbox_hub.message", "select n from pillarbox_hub.attempt");
    eventually("the completed message is deleted", DEADLINE, async || match numbers(db, messages).await {
        left if left == BTreeSet::from([2, 3, 4]) => Ok(()),
        other => Err(other),
    })
    .await;
    let carried = "select n from pillarbox_hub.message where at > now() - interval '1 day'";
    assert_eq!(
        numbers(db, carried).await,
        BTreeSet::from([2, 3, 4]),
        "waiting messages are moved to a newer partition"
    );
    eventually("old attempts are deleted", DEADLINE, async || numbers(db, attempts).await == BTreeSet::from([3])).await;
    maintaining.stop().await;

    sqlx::raw_sql(
        "delete from pillarbox_hub.lane;
         update pillarbox_hub.message set at = at - interval '100 days' where n = 2",
    )
    .execute(db)
    .await
    .unwrap();
    let maintaining = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    eventually("all old rows are deleted", DEADLINE, async || {
        let mut left = Vec::new();
        for query in [dead_letters, messages, attempts] {
            left.push(numbers(db, query).await);
        }
        if left == [3, 4, 3].map(|last| BTreeSet::from([3, last])) { Ok(()) } else { Err(left) }
    })
    .await;
    maintaining.stop().await;
}

#[tokio::test]
async fn messages_older_than_their_retention_are_sent_after_a_resume() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    let receiver =
        Receiver::with_reply(|received| Reply::status(if received.json()["n"] == 2 { 503 } else { 200 })).await;
    let made = subscribe(&manager, &receiver.url(), json!({"retry_backoff_seconds": [3600]})).await;
    let path = |what: &str| format!("/hub/v1/subscribers/{}/{what}", text(&made["id"]));
    // 1 is delivered, 2 waits for its retry, 3 waits behind 2, and 4 waits because the subscriber is paused.
    let mut events = Vec::new();
    for (n, lane) in [(1, "a"), (2, "b"), (3, "b")] {
        events.push(post(&manager, "test.posted", json!({ "n": n }), Some(lane)).await);
    }
    wait_for_outcome(&manager, &events[1], &made, "failed").await;
    wait_for_outcome(&manager, &events[0], &made, "delivered").await;
    app.stop().await;
    // A dispatcher learns of a pause with a short delay, so none runs here.
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Fanout]).await;
    let manager = caller(&app, "manage", "acme").await;
    assert_eq!(manager.post(&path("pause"), json!({})).await.status, 200);
    events.push(post(&manager, "test.posted", json!({"n": 4}), Some("a")).await);
    wait_for_outcome(&manager, &events[3], &made, "pending").await;
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
    eventually("the completed message is deleted", DEADLINE, async || match numbers(db, messages).await {
        left if left == BTreeSet::from([2, 3, 4]) => Ok(()),
        other => Err(other),
    })
    .await;
    wait_for_outcome(&manager, &events[1], &made, "failed").await;
    assert_eq!(receiver.count(), 2);
    assert_eq!(manager.post(&path("resume"), json!({})).await.status, 200);
    // The last attempt of 2 fails; 3 is unblocked then.
    wait_for_webhooks(&receiver, 5).await;
    wait_for_outcome(&manager, &events[1], &made, "dead").await;
    for event in &events[2..] {
        wait_for_outcome(&manager, event, &made, "delivered").await;
    }
    app.stop().await;
    assert_eq!(receiver.count(), 5, "the first one is not sent again");
}

#[tokio::test]
async fn a_message_whose_event_expired_is_dead_and_its_lane_continues() {
    let Fixture { database, app, manager } =
        Fixture::start_with(|settings| settings.roles = vec![Role::Api, Role::Fanout]).await;
    let receiver = Receiver::start().await;
    let made = subscribe(&manager, &receiver.url(), json!({})).await;
    let path = |what: &str| format!("/hub/v1/subscribers/{}/{what}", text(&made["id"]));
    assert_eq!(manager.post(&path("pause"), json!({})).await.status, 200);
    let events = [
        post(&manager, "test.posted", json!({"n": 1}), Some("lane")).await,
        post(&manager, "test.posted", json!({"n": 2}), Some("lane")).await,
    ];
    wait_for_outcome(&manager, &events[1], &made, "pending").await;
    app.stop().await;
    let delete = "delete from pillarbox.log where topic = 'test.posted' and payload::jsonb = '{\"n\": 1}'";
    assert_eq!(sqlx::query(delete).execute(database.pool()).await.unwrap().rows_affected(), 1);
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    assert_eq!(manager.post(&path("resume"), json!({})).await.status, 200);
    wait_for_outcome(&manager, &events[1], &made, "delivered").await;
    let dead = wait_for_dead_letters(&manager, &made, 1).await.remove(0);
    let texts = [&dead["reason"], &dead["detail"]].map(text);
    assert_eq!((texts, &dead["attempts"]), (["expired", "the log no longer has it"], &json!(1)));
    app.stop().await;
    assert_eq!(receiver.count(), 1);
}

/// A day partition of messages that cannot be dropped yet outlives the positions and attempts of that day.
#[tokio::test]
async fn a_delivered_message_is_not_resent_after_its_attempts_are_deleted() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    let receiver = Receiver::start().await;
    let made = subscribe(&manager, &receiver.url(), json!({})).await;
    let event = post(&manager, "test.posted", json!({"n": 1}), None).await;
    wait_for_outcome(&manager, &event, &made, "delivered").await;
    let positions = "select n from pillarbox_hub.position where n > 0";
    eventually("its position is saved", DEADLINE, async || !numbers(db, positions).await.is_empty()).await;
    app.stop().await;
    sqlx::raw_sql(
        "update pillarbox_hub.message set at = at - interval '180 hours';
         update pillarbox_hub.position set at = at - interval '40 days';
         update pillarbox_hub.attempt set at = at - interval '40 days'",
    )
    .execute(db)
    .await
    .unwrap();
    let maintaining = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    let attempts = "select n from pillarbox_hub.attempt";
    eventually("old attempts are deleted", DEADLINE, async || numbers(db, attempts).await.is_empty()).await;
    maintaining.stop().await;
    assert_eq!(
        numbers(db, "select n from pillarbox_hub.message").await,
        BTreeSet::from([1]),
        "the partition of its day still exists"
    );
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let event = post(&manager, "test.posted", json!({"n": 2}), None).await;
    wait_for_outcome(&manager, &event, &made, "delivered").await;
    app.stop().await;
    assert_eq!(receiver.count(), 2, "the first one is not sent again");
}

#[tokio::test]
async fn the_gauges_count_pending_stale_and_dead_messages_up_to_a_bound() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    // Separate processes, because all apps inside the test process share their metrics.
    let mut serving = Replica::start_as(&database.url(), "api");
    let manager = serving.admin().await;
    let (much, little) = (create_subscriber(&manager, "much").await, create_subscriber(&manager, "little").await);
    create_subscriber(&manager, "nothing").await;
    let event = insert_event(db, "main", "order.paid", "{}").await;
    // For each subscriber, the position is at the first message, and one dead letter was retried.
    for (of, from, to) in [(much, 1, 1_201), (little, 2_001, 2_004)] {
        insert_message(db, from, of, event).await;
        insert_dead_letter(db, "main", of, from, (event, "order.paid"), "exhausted").await;
        for copied in [
            "insert into pillarbox_hub.message
             select (message).* from (select jsonb_populate_record(message, jsonb_build_object('n', number)) as message
                                      from pillarbox_hub.message, generate_series($2 + 1, $3) as number where message.n = $2
                                        and subscriber = $1) as copy",
            "insert into pillarbox_hub.dead_letter
             select (dead).* from (select jsonb_populate_record(dead_letter, jsonb_build_object('n', number, 'id', gen_random_uuid())) as dead
                                   from pillarbox_hub.dead_letter, generate_series($2 + 1, $3) as number where dead_letter.n = $2
                                     and subscriber = $1) as copy",
            "update pillarbox_hub.dead_letter set manual_retry_at = now(), manual_retry_by = 'someone'
             where subscriber = $1 and n = $2 and $3 > 0",
            "insert into pillarbox_hub.position (subscriber, n, at) select $1, $2, now() where $3 > 0",
        ] {
            sqlx::query(copied).bind(of).bind(from).bind(to).execute(db).await.unwrap();
        }
    }
    let waits = "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, manual_retry)
                 select $1, n, 'lane ' || n, 1, now(), false from generate_series(2001, 2005) as n";
    sqlx::query(waits).bind(little).execute(db).await.unwrap();
    // All messages are two minutes old. Only one of them is stale: `much` is paused; of the messages beyond the position of
    // `little`, 2002 was tried, and 2004 waits in its lane.
    insert_attempt(db, little, 2_002, 1, "failed", 503).await;
    for change in [
        "update pillarbox_hub.message set at = at - interval '2 minutes'",
        "update pillarbox_hub.message set lane = 'lane 2004' where n = 2004",
        "update pillarbox_hub.subscriber set paused_at = now() where name = 'much'",
    ] {
        sqlx::query(change).execute(db).await.unwrap();
    }
    assert!(serving.process.terminate().await.success());
    let mut measuring = Replica::start_as(&database.url(), "api,maintain");
    let measured = async |name: &str| measuring.metric(name).await.map(|value| value as i64);
    for gauge in ["eventhub_pending_messages", "eventhub_dlq_size", "pillarbox_hub_stale_messages"] {
        eventually("the gauge is set", DEADLINE, async || measured(gauge).await.is_some()).await;
    }
    assert_eq!(measured("eventhub_pending_messages").await, Some(1_000 + 3 + 5));
    assert_eq!(measured("eventhub_dlq_size").await, Some(1_000 + 3));
    assert_eq!(measured("pillarbox_hub_stale_messages").await, Some(1));
    assert!(measuring.process.terminate().await.success());
}
