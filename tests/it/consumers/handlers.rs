//! Handlers, tested on the library itself: the subscriptions of the services use the same shard workers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::consumers::StartAt;
use pillarbox::log::Message;
use pillarbox::operations::status;
use testkit::eventually;

use crate::consumers::support::{
    Process, Recorder, TIMEOUT, count, database, effects, fast_options, numbers, post_numbers, recorder,
    wait_for_count, wait_for_effects,
};

#[tokio::test]
async fn every_message_has_one_effect_in_the_order_of_its_key() {
    let database = database().await;
    let db = database.pool();
    let processes: Vec<Process> = (0..3).map(|_| Process::start(db, recorder())).collect();
    for round in 0..20 {
        for key in 0..10 {
            post_numbers(db, Some(&format!("key{key}")), round * 5..(round + 1) * 5).await;
        }
    }
    wait_for_effects(db, 1_000).await;
    for process in processes {
        process.stop().await;
    }
    let mut by_key: HashMap<String, Vec<i64>> = HashMap::new();
    for (key, number) in effects(db).await {
        by_key.entry(key.unwrap()).or_default().push(number);
    }
    assert_eq!(by_key.len(), 10);
    assert!(by_key.values().all(|numbers| *numbers == (0..100).collect::<Vec<_>>()), "{by_key:?}");
    assert_eq!(count(db, "inbox").await, 1_000);
    assert_eq!(count(db, "shard_worker").await, 0, "a process releases its leases when it stops");
}

#[tokio::test]
async fn a_consumer_reads_its_sources_from_its_start_position() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, None, [1]).await;
    let process = Process::start_with(db, recorder(), StartAt::Now, fast_options());
    wait_for_count(db, "shard_worker", 1).await;
    sqlx::query("select pillarbox.post('test.posted', '2')").execute(db).await.unwrap();
    post_numbers(db, None, [3]).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [3], "neither earlier messages nor those of another source");
    // The stored position counts, not `Now`: messages posted while no process runs are not lost.
    post_numbers(db, None, [4]).await;
    let process = Process::start_with(db, recorder(), StartAt::Now, fast_options());
    wait_for_effects(db, 2).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [3, 4]);
}

#[tokio::test]
async fn a_message_that_is_in_the_log_twice_has_one_effect() {
    let database = database().await;
    let db = database.pool();
    let id = uuid::Uuid::now_v7();
    let payload = serde_json::value::RawValue::from_string("7".to_owned()).unwrap();
    let mut message = pillarbox::log::Post::new("test.posted", payload);
    message.id = Some(id);
    let mut tx = db.begin().await.unwrap();
    let source = pillarbox::log::Source::new("test");
    pillarbox::log::post_all(&mut tx, &source, &[message.clone(), message]).await.unwrap();
    tx.commit().await.unwrap();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [8]).await;
    eventually("both are processed", TIMEOUT, async || {
        numbers(db).await.contains(&8) && numbers(db).await.contains(&7)
    })
    .await;
    process.stop().await;
    assert_eq!(effects(db).await.len(), 2);
}

#[tokio::test]
async fn outbox_status_shows_the_state_of_each_message() {
    let database = database().await;
    let db = database.pool();
    let handler = Recorder(|_: &Message, number| if number < 0 { Err("negative".into()) } else { Ok(()) });
    let mut options = fast_options();
    options.worker.retry.backoff.first = Duration::from_secs(600);
    options.worker.retry.backoff.max = Duration::from_secs(600);
    let process = Process::start_with(db, Arc::new(handler), StartAt::Beginning, options);
    post_numbers(db, Some("a"), [1]).await;
    post_numbers(db, Some("b"), [-1, 2]).await;
    wait_for_count(db, "parked", 2).await;
    // Later messages of the key wait behind the parked ones.
    post_numbers(db, Some("b"), [5]).await;
    wait_for_count(db, "parked", 3).await;
    process.stop().await;
    post_numbers(db, Some("c"), [3]).await;
    sqlx::query("select pillarbox.post('test.posted', '4')").execute(db).await.unwrap();
    let rows: Vec<(i64, String, bool, i32, Option<String>)> = sqlx::query_as(
        "select log.payload::text::bigint, status, sent_at >= created_at is true, attempts, last_error
         from pillarbox.outbox_status join pillarbox.log using (message_id) where consumer = 'effects' order by log.id",
    )
    .fetch_all(db)
    .await
    .unwrap();
    let row = |number: i64, status: &str, sent: bool, attempts, error: Option<&str>| {
        (number, status.to_owned(), sent, attempts, error.map(str::to_owned))
    };
    assert_eq!(
        rows,
        [
            row(1, "sent", true, 1, None),
            row(-1, "parked", false, 1, Some("negative")),
            row(2, "parked", false, 0, None),
            row(5, "parked", false, 0, None),
            row(3, "pending", false, 0, None)
        ]
    );
    let status = &status::consumers(db).await.unwrap()[0];
    assert_eq!((status.consumer.as_str(), status.parked, status.dead), ("effects", 3, 0));
    assert!(status.lag_messages >= 1 && status.lag_seconds > 0.0, "{status:?}");
}
