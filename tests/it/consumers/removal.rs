//! Consumers that are dropped and registered again.

use pillarbox::consumers::{Consumer, ConsumerKind, StartAt};
use pillarbox::log::Filter;
use pillarbox::operations::cursors::{self, DeleteResult};
use pillarbox::operations::status;
use sqlx::PgPool;

use crate::consumers::support::{Process, count, database, post_numbers, recorder, wait_for_effects};

pub(crate) async fn register(db: &PgPool, consumer: &str, start: StartAt) {
    let cursor = Consumer { name: consumer.to_owned(), kind: ConsumerKind::Relay, filter: Filter::everything(), start };
    cursor.register(db).await.unwrap();
}

#[tokio::test]
async fn a_dropped_consumer_starts_anew_when_it_is_registered_again() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    wait_for_effects(db, 3).await;
    process.stop().await;
    let positions = count(db, "position").await;
    assert!(positions > 0);
    let behind = async || status::consumers(db).await.unwrap()[0].lag_messages;

    for (start, expected) in [(StartAt::Beginning, 3), (StartAt::Now, 0), (StartAt::Beginning, 3)] {
        assert_eq!(cursors::delete(db, "effects").await.unwrap(), DeleteResult::Deleted { dead_letters: 0 });
        register(db, "effects", start).await;
        assert_eq!(behind().await, expected, "{start:?}");
    }
    assert_eq!(cursors::delete(db, "effects").await.unwrap(), DeleteResult::Deleted { dead_letters: 0 });
    assert!(
        count(db, "position").await >= positions,
        "positions are not deleted one by one, since there may be millions"
    );
}
