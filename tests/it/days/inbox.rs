//! The inbox: an effect happens once, whenever the message is delivered again.

use std::time::Duration;

use pillarbox::operations::maintenance::Retention;
use pillarbox::operations::replays::{self, Request};
use pillarbox::operations::retention_hold;
use sqlx::PgPool;

use crate::consumers::support::{Process, count, numbers, recorder, wait_for_effects, wait_for_replays};
use crate::days::support::{DAY, day, exists, maintain, post, start};

const WEEK: Retention = Retention { log_days: 7, behind_days: 7 };

/// Delivers all messages of the last 30 days again, to a running consumer.
async fn deliver_again(db: &PgPool) {
    let query = "select now() - interval '30 days', now() + interval '1 minute'";
    let (from, to) = sqlx::query_as(query).fetch_one(db).await.unwrap();
    let request = Request { consumer: "effects".to_owned(), from, to, again: false };
    replays::request(db, &request).await.unwrap().unwrap();
    wait_for_replays(db).await;
}

/// Makes retention preserve the log, as for webhooks that are not sent yet.
async fn preserve_log(db: &PgPool) {
    let from = sqlx::query_scalar("select now() - interval '1 hour'").fetch_one(db).await.unwrap();
    retention_hold::set(&mut db.acquire().await.unwrap(), "test", Some(from)).await.unwrap();
}

#[tokio::test]
async fn an_effect_happens_once_across_midnight_and_while_its_message_is_in_the_log() {
    let time = start().await;
    let db = time.database().pool();
    let to_midnight = "select extract(epoch from date_trunc('day', now() at time zone 'UTC') + interval '1 day'
                                              - (now() at time zone 'UTC'))::float8";
    let seconds: f64 = sqlx::query_scalar(to_midnight).fetch_one(db).await.unwrap();
    time.advance(Duration::from_secs_f64((seconds - 60.0).rem_euclid(86_400.0)));
    preserve_log(db).await;
    let inbox = day(db, "pillarbox.inbox", 0).await;
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    post(db, 2).await;
    time.advance(Duration::from_secs(90));
    assert_eq!(day(db, "pillarbox.inbox", 1).await, inbox, "it is the next day");
    let process = Process::start(db, recorder());
    post(db, 3).await;
    wait_for_effects(db, 3).await;
    deliver_again(db).await;
    assert_eq!(numbers(db).await, [1, 2, 3]);

    // The inbox is retained for eight days, and the log for longer because of the hold.
    for _ in 0..10 {
        time.advance(DAY);
        maintain(db, WEEK).await;
    }
    assert!(exists(db, &inbox).await, "messages of that day are in the log");
    assert_eq!(count(db, "inbox").await, 3);
    deliver_again(db).await;
    assert_eq!(numbers(db).await, [1, 2, 3]);

    retention_hold::set(&mut db.acquire().await.unwrap(), "test", None).await.unwrap();
    post(db, 4).await;
    wait_for_effects(db, 4).await;
    process.stop().await;
    // The positions of a consumer without messages advance once a second; this one has stopped.
    sqlx::query("update pillarbox.position set old_at = now()").execute(db).await.unwrap();
    time.advance(2 * DAY);
    maintain(db, WEEK).await;
    assert!(!exists(db, &inbox).await, "nothing can deliver them again");
    assert_eq!(numbers(db).await, [1, 2, 3, 4]);
}

#[tokio::test]
async fn the_inbox_is_not_purged_early() {
    let time = start().await;
    let db = time.database().pool();
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    let inbox = day(db, "pillarbox.inbox", 0).await;
    for today in 1..=15 {
        time.advance(DAY);
        post(db, 1 + today).await;
        wait_for_effects(db, 1 + today as usize).await;
        maintain(db, Retention::default()).await;
        assert!(exists(db, &inbox).await, "day {today}");
    }
    time.advance(2 * DAY);
    post(db, 17).await;
    wait_for_effects(db, 17).await;
    process.stop().await;
    maintain(db, Retention::default()).await;
    assert!(!exists(db, &inbox).await, "it is dropped in the end");
}

/// A producer in SQL may choose an id, which need not contain a time.
#[tokio::test]
async fn a_message_whose_id_has_no_time_has_its_effect_once_and_its_row_is_deleted_in_the_end() {
    let time = start().await;
    let db = time.database().pool();
    preserve_log(db).await;
    let process = Process::start(db, recorder());
    let chosen = "insert into pillarbox.log (shard, message_id, source, tenant, topic, payload)
                  select 3, id::uuid, 'test', 'main', 'test.posted', '1'
                  from unnest(array['00000000-0000-4000-8000-000000000001', 'f0000000-0000-4000-8000-000000000001']) as id";
    sqlx::query(chosen).execute(db).await.unwrap();
    wait_for_effects(db, 2).await;
    time.advance(5 * DAY);
    maintain(db, WEEK).await;
    deliver_again(db).await;
    assert_eq!(numbers(db).await, [1, 1]);
    assert_eq!(count(db, "inbox").await, 0, "no day of the inbox contains them");
    retention_hold::set(&mut db.acquire().await.unwrap(), "test", None).await.unwrap();
    process.stop().await;
    sqlx::query("update pillarbox.position set old_at = now() + interval '20 days'").execute(db).await.unwrap();
    time.advance(20 * DAY);
    for _ in 0..2 {
        maintain(db, WEEK).await; // the inbox outlives the log by one round
    }
    assert_eq!(count(db, "inbox_foreign").await, 0);
}

/// The process that posts a message may have a clock that is behind, and the inbox is partitioned by the time in the id.
#[tokio::test]
async fn a_message_whose_id_is_too_old_has_its_effect_once() {
    let time = start().await;
    let db = time.database().pool();
    preserve_log(db).await;
    let process = Process::start(db, recorder());
    let behind = "insert into pillarbox.log (shard, message_id, source, tenant, topic, payload)
                  values (3, pillarbox.uuid_at(now() - interval '10 days'), 'test', 'main', 'test.posted', '1')";
    // A valid UUID of version 7 has more bits than its time.
    let behind = behind.replace(
        "pillarbox.uuid_at(now() - interval '10 days')",
        "overlay(overlay(pillarbox.uuid_at(now() - interval '10 days')::text placing '7' from 15) placing '8' from 20)::uuid",
    );
    sqlx::query(sqlx::AssertSqlSafe(behind)).execute(db).await.unwrap();
    wait_for_effects(db, 1).await;
    time.advance(5 * DAY);
    maintain(db, WEEK).await;
    assert_eq!(count(db, "inbox").await, 0, "its row is older than the retention");
    deliver_again(db).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1]);
}
