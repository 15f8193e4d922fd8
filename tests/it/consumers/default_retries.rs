//! How often a consumer retries a failed message: by default, and without retries.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use pillarbox::consumers::{ConsumerOptions, StartAt};
use pillarbox::log::Message;
use sqlx::PgPool;
use testkit::eventually;

use crate::consumers::support::{
    FailingConsumer, Process, Recorder, TIMEOUT, count, database, numbers, post_numbers, wait_for_count,
    wait_for_effects,
};

async fn attempts_of_dead_letters(db: &PgPool) -> Vec<i32> {
    sqlx::query_scalar("select attempts from pillarbox.dead_letter order by id").fetch_all(db).await.unwrap()
}

/// The services use the default options.
#[tokio::test]
async fn a_message_is_given_up_after_three_retries_by_default() {
    let database = database().await;
    let db = database.pool();
    let attempts = Arc::<AtomicI32>::default();
    let counted = attempts.clone();
    let handler = Recorder(move |_: &Message, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        Err("always".into())
    });
    let process = Process::start_with(db, Arc::new(handler), StartAt::Beginning, ConsumerOptions::default());
    post_numbers(db, Some("a"), [1]).await;
    eventually("the message is given up", TIMEOUT, async || {
        // Its retries are due now, not after seconds.
        sqlx::query("update pillarbox.parked set next_at = now()").execute(db).await.unwrap();
        count(db, "dead_letter").await == 1
    })
    .await;
    process.stop().await;
    assert_eq!((attempts.load(Ordering::SeqCst), attempts_of_dead_letters(db).await), (4, vec![4]));
}

#[tokio::test]
async fn a_consumer_without_retries_gives_a_message_up_at_its_first_failure() {
    let database = database().await;
    let db = database.pool();
    let consumer = FailingConsumer::without_retries(db);
    post_numbers(db, Some("a"), [1, -2, 3, -4, 5]).await;
    post_numbers(db, None, [-6]).await;
    wait_for_count(db, "dead_letter", 3).await;
    wait_for_effects(db, 3).await;
    wait_for_count(db, "parked", 0).await;
    consumer.process.stop().await;
    assert_eq!(attempts_of_dead_letters(db).await, [1, 1, 1], "each was tried once");
    assert_eq!(numbers(db).await, [1, 3, 5], "the key continues in its order");
    let announced = "select count(*) from pillarbox.log where topic = 'dead_letter.effects'";
    assert_eq!(sqlx::query_scalar::<_, i64>(announced).fetch_one(db).await.unwrap(), 3);
}
