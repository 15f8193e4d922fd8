//! Replays: they repair missing effects, or repeat all of them.

use chrono::Utc;
use pillarbox::operations::replays;

use crate::consumers::support::{
    Process, count, database, effects, numbers, post_numbers, recorder, wait_for_effects, wait_for_replays,
};

#[tokio::test]
async fn a_replay_repairs_and_with_again_it_repeats() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, recorder());
    wait_for_effects(db, 3).await;
    // An effect was lost, and the operator has deleted its inbox row.
    sqlx::query("delete from effect where number = 2").execute(db).await.unwrap();
    sqlx::query("delete from pillarbox.inbox where message_id = (select message_id from pillarbox.log where payload::text = '2')")
        .execute(db)
        .await
        .unwrap();
    let (from, to) = (Utc::now() - chrono::Duration::hours(1), Utc::now() + chrono::Duration::hours(1));
    let mut request = replays::Request { consumer: "effects".to_owned(), from, to, again: false };
    assert!(replays::request(db, &request).await.unwrap().is_some());
    wait_for_effects(db, 3).await;
    wait_for_replays(db).await;
    assert_eq!(numbers(db).await, [1, 3, 2], "only the missing effect");

    request.again = true;
    replays::request(db, &request).await.unwrap();
    wait_for_effects(db, 6).await;
    wait_for_replays(db).await;
    assert_eq!(numbers(db).await[3..], [1, 2, 3], "all messages, in order");
    request.from = to;
    request.to = to + chrono::Duration::hours(1);
    replays::request(db, &request).await.unwrap();
    wait_for_replays(db).await;
    process.stop().await;
    assert_eq!(effects(db).await.len(), 6, "nothing outside the range");
    request.consumer = "missing".to_owned();
    assert!(replays::request(db, &request).await.unwrap().is_none());
}

#[tokio::test]
async fn a_replay_covers_the_part_of_an_open_window_that_was_read() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, recorder());
    wait_for_effects(db, 3).await;
    process.stop().await;
    // The position of a reader after a chunk with exactly as many messages as its limit.
    sqlx::query(
        "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
         select 'effects', array_agg(shard::smallint), array_fill((select max(id) from pillarbox.log), array[16]),
                '3:3:', 0, now(), pg_current_snapshot(), 0, now()
         from generate_series(0, 15) as shard",
    )
    .execute(db)
    .await
    .unwrap();
    let from = Utc::now() - chrono::Duration::hours(1);
    let request = replays::Request { consumer: "effects".to_owned(), from, to: Utc::now(), again: true };
    replays::request(db, &request).await.unwrap();
    let process = Process::start(db, recorder());
    wait_for_replays(db).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 2, 3, 1, 2, 3]);
}

#[tokio::test]
async fn a_replay_of_a_handler_does_not_search_the_messages_that_no_queue_took() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, recorder());
    wait_for_effects(db, 3).await;
    // Only routes have such rows. If a handler had one, its replay would not delete it.
    let row = "insert into pillarbox.unrouted (consumer, log_id) select 'effects', id from pillarbox.log";
    sqlx::query(row).execute(db).await.unwrap();
    let (from, to) = (Utc::now() - chrono::Duration::hours(1), Utc::now() + chrono::Duration::hours(1));
    let request = replays::Request { consumer: "effects".to_owned(), from, to, again: true };
    replays::request(db, &request).await.unwrap();
    wait_for_effects(db, 6).await;
    wait_for_replays(db).await;
    process.stop().await;
    assert_eq!(count(db, "unrouted").await, 3);
}
