//! What the hub forgets, and what it must not.

use std::collections::BTreeSet;

use mailbox::database::migrations;
use pillarbox::settings::Role;
use serde_json::json;
use sqlx::PgPool;
use testkit::{Receiver, Reply, TestApp, TestDatabase, drain};

use crate::hub_delivery::{PATIENCE, caller, post, subscribe, until_received};
use crate::hub_fleet::Replica;
use crate::hub_people::{attempt, bury, make_message, post_event, start, subscriber};
use crate::hub_world::{World, text, until_dead, until_outcome};

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
    app.stop().await;
    // Who sends hears of a pause a moment later, so nobody sends meanwhile.
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Fanout]).await;
    let manager = caller(&app, "manage", "acme").await;
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
    drain("what is settled is gone", PATIENCE, async || match found(db, messages).await {
        left if left == BTreeSet::from([2, 3, 4]) => Ok(()),
        other => Err(other),
    })
    .await;
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

#[tokio::test]
async fn a_message_whose_event_is_gone_dies_unsent_and_its_lane_goes_on() {
    let World { database, app, manager } =
        World::start_with(|settings| settings.roles = vec![Role::Api, Role::Fanout]).await;
    let receiver = Receiver::start().await;
    let made = subscribe(&manager, &receiver.url(), json!({})).await;
    let path = |what: &str| format!("/hub/v1/subscribers/{}/{what}", text(&made["id"]));
    assert_eq!(manager.post(&path("pause"), json!({})).await.status, 200);
    let events = [
        post(&manager, "test.posted", json!({"n": 1}), Some("lane")).await,
        post(&manager, "test.posted", json!({"n": 2}), Some("lane")).await,
    ];
    until_outcome(&manager, &events[1], &made, "pending").await;
    app.stop().await;
    let gone = "delete from pillarbox.log where topic = 'test.posted' and payload::jsonb = '{\"n\": 1}'";
    assert_eq!(sqlx::query(gone).execute(database.pool()).await.unwrap().rows_affected(), 1);
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    assert_eq!(manager.post(&path("resume"), json!({})).await.status, 200);
    until_outcome(&manager, &events[1], &made, "delivered").await;
    let dead = until_dead(&manager, &made, 1).await.remove(0);
    let told = [&dead["reason"], &dead["detail"]].map(text);
    assert_eq!((told, &dead["attempts"]), (["expired", "the log no longer has it"], &json!(1)));
    app.stop().await;
    assert_eq!(receiver.count(), 1);
}

/// A day of messages that cannot be dropped yet outlives the positions and the attempts of its time.
#[tokio::test]
async fn what_was_passed_is_not_sent_again_while_its_day_is_still_there() {
    let World { database, app, manager } = World::start().await;
    let db = database.pool();
    let receiver = Receiver::start().await;
    let made = subscribe(&manager, &receiver.url(), json!({})).await;
    let event = post(&manager, "test.posted", json!({"n": 1}), None).await;
    until_outcome(&manager, &event, &made, "delivered").await;
    let positions = "select n from pillarbox_hub.position where n > 0";
    drain("its position is kept", PATIENCE, async || !found(db, positions).await.is_empty()).await;
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
    drain("old attempts are gone", PATIENCE, async || found(db, attempts).await.is_empty()).await;
    maintaining.stop().await;
    assert_eq!(found(db, "select n from pillarbox_hub.message").await, BTreeSet::from([1]), "its day is still there");
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let event = post(&manager, "test.posted", json!({"n": 2}), None).await;
    until_outcome(&manager, &event, &made, "delivered").await;
    app.stop().await;
    assert_eq!(receiver.count(), 2, "and the first was not sent again");
}

#[tokio::test]
async fn what_waits_and_what_has_died_is_measured_up_to_a_bound_for_each() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    // Processes of their own: all that are in this one share their metrics.
    let mut serving = Replica::start_as(&database.url(), "api");
    let manager = serving.admin().await;
    let (much, little) = (subscriber(&manager, "much").await, subscriber(&manager, "little").await);
    subscriber(&manager, "nothing").await;
    let event = post_event(db, "main", "order.paid", "{}").await;
    // Of each the first was passed, and one dead letter was retried.
    for (of, from, to) in [(much, 1, 1_201), (little, 2_001, 2_004)] {
        make_message(db, from, of, event).await;
        bury(db, "main", of, from, (event, "order.paid"), "exhausted").await;
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
    let waits = "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, again)
                 select $1, n, 'lane ' || n, 1, now(), false from generate_series(2001, 2005) as n";
    sqlx::query(waits).bind(little).execute(db).await.unwrap();
    assert!(serving.process.terminate().await.success());
    let mut measuring = Replica::start_as(&database.url(), "api,maintain");
    let reader = measuring.admin().await;
    let measured = async |name: &str| {
        let metrics = reader.get("/metrics").await.text;
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(|value| value.parse::<f64>().unwrap() as i64)
    };
    drain("it is measured", PATIENCE, async || measured("eventhub_dlq_size").await.is_some()).await;
    assert_eq!(measured("eventhub_pending_messages").await, Some(1_000 + 3 + 5));
    assert_eq!(measured("eventhub_dlq_size").await, Some(1_000 + 3));
    assert!(measuring.process.terminate().await.success());
}
