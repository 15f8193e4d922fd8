//! Fan-out from hub events to hub messages: bounded batches, exactly once, and replays.

use serde_json::json;
use server::settings::Role;
use sqlx::PgPool;
use testkit::{CapturedLog, Receiver, Reply, TestApp, eventually};
use uuid::Uuid;

use crate::hub::fixture::{
    Fixture, post, replay_fanout, subscribe, wait_for_dead_letters, wait_for_outcome, wait_for_webhooks,
};
use crate::support::{DEADLINE, uuid_of};

pub(crate) async fn count(db: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

/// Inserts `events` hub events of the tenant `acme` in one statement.
async fn post_many(db: &PgPool, events: i32) {
    sqlx::query(
        "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
         select pillarbox.shard_of('acme', 'k' || n % 7), pillarbox.uuid_v7(), 'hub', 'acme', 'test.many', 'k' || n % 7, '{}',
                json_build_object('n', n)
         from generate_series(1, $1) as n",
    )
    .bind(events)
    .execute(db)
    .await
    .unwrap();
}

/// Inserts `copies` paused copies of a subscriber.
pub(crate) async fn copy_subscriber(db: &PgPool, id: Uuid, copies: i32) {
    sqlx::query(
        "insert into pillarbox_hub.subscriber
         select (jsonb_populate_record(one, jsonb_build_object('id', gen_random_uuid(), 'paused_at', now()))).*
         from pillarbox_hub.subscriber as one cross join generate_series(1, $2) where id = $1",
    )
    .bind(id)
    .bind(copies)
    .execute(db)
    .await
    .unwrap();
}

#[tokio::test]
async fn a_backlog_for_many_subscribers_is_fanned_out_in_bounded_batches() {
    const SUBSCRIBERS: i32 = 150;
    const EVENTS: i32 = 1_000;
    let Fixture { database, app, manager } = Fixture::start_with(|settings| settings.roles = vec![Role::Api]).await;
    let db = database.pool();
    let first = subscribe(&manager, "https://example.com/hook", json!({})).await;
    copy_subscriber(db, uuid_of(&first["id"]), SUBSCRIBERS - 1).await;
    post_many(db, EVENTS).await;
    app.stop().await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Fanout]).await;
    eventually("every hub message is created", DEADLINE * 3, async || {
        let made = count(db, "select count(*) from pillarbox_hub.message").await;
        if made == i64::from(SUBSCRIBERS * EVENTS) { Ok(()) } else { Err(made) }
    })
    .await;
    app.stop().await;
    let transactions =
        "select max(made) from (select count(*) as made from pillarbox_hub.message group by xmin) as one";
    assert!(count(db, transactions).await <= 500, "the share of one tenant");
    check_order(db).await;
}

/// Fails if a number is missing, or if a lane does not follow the order of the log.
async fn check_order(db: &PgPool) {
    let gaps = "select count(*) from (select n - lag(n) over (order by n) as step from pillarbox_hub.message) as one where step <> 1";
    assert_eq!(count(db, gaps).await, 0);
    let disorder =
        "select count(*) from (select seq - lag(seq) over lane as step, log_id - lag(log_id) over lane as further
                    from pillarbox_hub.message window lane as (partition by subscriber, lane order by n)) as one
                    where step <> 1 or further <= 0";
    assert_eq!(count(db, disorder).await, 0, "each lane follows the order of the log, without gaps");
}

#[tokio::test]
async fn deferred_events_are_fanned_out_once_and_in_order_after_a_restart_and_a_replay() {
    // Each event matches more subscribers than fit into one transaction.
    const SUBSCRIBERS: i32 = 700;
    const EVENTS: i32 = 60;
    let Fixture { database, app, manager } = Fixture::start_with(|settings| settings.roles = vec![Role::Api]).await;
    let db = database.pool();
    let first = subscribe(&manager, "https://example.com/hook", json!({})).await;
    copy_subscriber(db, uuid_of(&first["id"]), SUBSCRIBERS - 1).await;
    post_many(db, EVENTS).await;
    app.stop().await;
    let deferred = "select count(*) from pillarbox_hub.deferred_event";
    // Slows fan-out down, so that it is stopped long before its end.
    sqlx::raw_sql(
        "create function wait() returns trigger language plpgsql as $$ begin perform pg_sleep(0.2); return null; end $$;
         create trigger wait after insert on pillarbox_hub.fanout_batch for each statement execute function wait()",
    )
    .execute(db)
    .await
    .unwrap();
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Fanout]).await;
    eventually("some messages are created", DEADLINE, async || {
        count(db, "select count(*) from pillarbox_hub.fanout_batch").await > 3
    })
    .await;
    app.stop().await;
    let left = count(db, deferred).await;
    assert!(left > 0 && left < i64::from(EVENTS), "{left} are left, so the stop was in the middle");
    sqlx::raw_sql("drop function wait cascade").execute(db).await.unwrap();
    // A repair: deferred events are not missing.
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Fanout]).await;
    replay_fanout(db, false).await;
    eventually("no event is deferred any more", DEADLINE * 2, async || count(db, deferred).await == 0).await;
    app.stop().await;
    let distinct = "select count(distinct (subscriber, log_id)) from pillarbox_hub.message";
    let (all, distinct) = (count(db, "select count(*) from pillarbox_hub.message").await, count(db, distinct).await);
    assert_eq!((all, distinct), (i64::from(SUBSCRIBERS * EVENTS), i64::from(SUBSCRIBERS * EVENTS)));
    check_order(db).await;
}

#[tokio::test]
async fn a_batch_that_cannot_be_saved_is_retried_in_parts() {
    const SUBSCRIBERS: i32 = 4;
    const EVENTS: i32 = 600;
    let Fixture { database, app, manager } = Fixture::start_with(|settings| settings.roles = vec![Role::Api]).await;
    let db = database.pool();
    let first = subscribe(&manager, "https://example.com/hook", json!({})).await;
    copy_subscriber(db, uuid_of(&first["id"]), SUBSCRIBERS - 1).await;
    post_many(db, EVENTS).await;
    app.stop().await;
    // Simulates a statement timeout for more than 500 rows.
    sqlx::raw_sql(
        "create function refuse_many() returns trigger language plpgsql as $$
         begin
             if (select count(*) from made) > 500 then raise exception 'too many'; end if;
             return null;
         end $$;
         create trigger refuse_many after insert on pillarbox_hub.message referencing new table as made
             for each statement execute function refuse_many()",
    )
    .execute(db)
    .await
    .unwrap();
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Fanout]).await;
    eventually("every hub message is created", DEADLINE, async || {
        let made = count(db, "select count(*) from pillarbox_hub.message").await;
        if made == i64::from(SUBSCRIBERS * EVENTS) { Ok(()) } else { Err(made) }
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn a_replay_creates_missing_messages_and_again_creates_all() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    let receiver =
        Receiver::with_reply(|received| Reply::status(if received.json()["bad"] == true { 400 } else { 200 })).await;
    let filter = json!([{"pointer": "/n", "op": "gt", "value": 1}]);
    let fields = json!({"event_types": ["order.paid"], "filter": filter});
    let subscriber = subscribe(&manager, &receiver.url(), fields).await;
    for n in 1..=4 {
        post(&manager, "order.paid", json!({"n": n, "bad": n == 4}), Some("k")).await;
    }
    let unmatched = post(&manager, "order.lost", json!({"n": 9}), None).await;
    // The endpoint rejects the fourth event; a manual retry sends it again, and it is rejected again.
    let dead = wait_for_dead_letters(&manager, &subscriber, 1).await;
    let path = format!("/hub/v1/dead-letters/{}/retry", dead[0]["id"].as_str().unwrap());
    assert_eq!(manager.post(&path, json!({})).await.status, 202);
    wait_for_webhooks(&receiver, 4).await;
    wait_for_dead_letters(&manager, &subscriber, 2).await;

    let messages = "select count(*) from pillarbox_hub.message";
    let skipped = "select count(*) from pillarbox_hub.skipped";
    // A subscriber created later gets no event from before its creation, matched or not.
    let late = subscribe(&manager, &receiver.url(), json!({"is_active": true})).await;
    let later = "update pillarbox_hub.subscriber set created_at = created_at + interval '1 hour' where id = $1";
    sqlx::query(later).bind(uuid_of(&late["id"])).execute(db).await.unwrap();
    replay_fanout(db, false).await;
    assert_eq!((count(db, messages).await, count(db, skipped).await), (4, 1), "nothing is missing");

    // Simulates that fan-out skipped the second event.
    let lost = "delete from pillarbox_hub.message where n = 1";
    sqlx::query(lost).execute(db).await.unwrap();
    replay_fanout(db, false).await;
    assert_eq!((count(db, messages).await, count(db, skipped).await), (4, 1), "only the missing one");
    wait_for_webhooks(&receiver, 5).await;

    replay_fanout(db, true).await;
    wait_for_outcome(&manager, &unmatched, &late, "delivered").await;
    assert_eq!(count(db, skipped).await, 2, "the filter skips the first one again");
    // Live run: 2, 3, 4 and the retry of 4. Replay: the same four once more, and all five events for the late subscriber.
    assert_eq!(count(db, messages).await, 4 + 4 + 5);
    app.stop().await;
}

#[tokio::test]
async fn an_unknown_command_blocks_no_event_and_is_logged() {
    let log = CapturedLog::start();
    let Fixture { database, app, manager } = Fixture::start().await;
    let receiver = Receiver::start().await;
    subscribe(&manager, &receiver.url(), json!({})).await;
    for (topic, payload) in [("hub.message.polish", "{}"), ("hub.message.dead_letter", r#"{"whom":"unknown"}"#)] {
        let posted = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
                      values (pillarbox.shard_of('acme', 'k'), pillarbox.uuid_v7(), 'hub.control', 'acme', $1, 'k', '{}', $2::json)";
        sqlx::query(posted).bind(topic).bind(payload).execute(database.pool()).await.unwrap();
    }
    post(&manager, "order.paid", json!({}), None).await;
    wait_for_webhooks(&receiver, 1).await;
    assert!(log.has("ERROR", "an operator command cannot be decoded and is skipped"), "{}", log.text());
    app.stop().await;
}
