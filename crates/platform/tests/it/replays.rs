//! Replays: what is missing is repaired, or all of it is done again.

use chrono::Utc;
use mailbox::replay;

use crate::consuming::{
    Process, database, effects, numbers, post_numbers, recorder, until_effects, until_replays_are_done,
};

#[tokio::test]
async fn a_replay_repairs_and_again_repeats() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, recorder());
    until_effects(db, 3).await;
    // A fault ate an effect, and the operator removed what says that it happened.
    sqlx::query("delete from effect where number = 2").execute(db).await.unwrap();
    sqlx::query("delete from pillarbox.inbox where message_id = (select message_id from pillarbox.log where payload::text = '2')")
        .execute(db)
        .await
        .unwrap();
    let (from, to) = (Utc::now() - chrono::Duration::hours(1), Utc::now() + chrono::Duration::hours(1));
    let mut request = replay::Request { consumer: "effects".to_owned(), from, to, again: false };
    assert!(replay::request(db, &request).await.unwrap().is_some());
    until_effects(db, 3).await;
    until_replays_are_done(db).await;
    assert_eq!(numbers(db).await, [1, 3, 2], "only what was missing");

    request.again = true;
    replay::request(db, &request).await.unwrap();
    until_effects(db, 6).await;
    until_replays_are_done(db).await;
    assert_eq!(numbers(db).await[3..], [1, 2, 3], "all of it, in order");
    request.from = to;
    request.to = to + chrono::Duration::hours(1);
    replay::request(db, &request).await.unwrap();
    until_replays_are_done(db).await;
    process.stop().await;
    assert_eq!(effects(db).await.len(), 6, "nothing outside the range");
    request.consumer = "nobody".to_owned();
    assert!(replay::request(db, &request).await.unwrap().is_none());
}

#[tokio::test]
async fn a_replay_covers_what_was_read_of_a_window_that_is_still_open() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, recorder());
    until_effects(db, 3).await;
    process.stop().await;
    // Where a chunk leaves a reader that brought just as much as it was asked for.
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
    let request = replay::Request { consumer: "effects".to_owned(), from, to: Utc::now(), again: true };
    replay::request(db, &request).await.unwrap();
    let process = Process::start(db, recorder());
    until_replays_are_done(db).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 2, 3, 1, 2, 3]);
}
