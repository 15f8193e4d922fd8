//! Consumers that are dropped and come back.

use chrono::Utc;
use mailbox::cursor::{self, Cursor, Dropped, Kind, Start};
use mailbox::filter::Filter;
use mailbox::maintain::{self, Keep};
use mailbox::status;
use sqlx::PgPool;

use crate::consuming::{Process, count, database, post_numbers, recorder, until_effects};

pub(crate) async fn register(db: &PgPool, consumer: &str, start: Start) {
    let cursor = Cursor { consumer: consumer.to_owned(), kind: Kind::Relay, filter: Filter::everything(), start };
    cursor.register(db).await.unwrap();
}

#[tokio::test]
async fn a_dropped_consumer_leaves_its_places_to_their_days_and_begins_anew() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    until_effects(db, 3).await;
    process.stop().await;
    let places = count(db, "position").await;
    assert!(places > 0);
    let behind = async || status::consumers(db).await.unwrap()[0].lag_messages;

    for (start, expected) in [(Start::Beginning, 3), (Start::Now, 0), (Start::Beginning, 3)] {
        assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::Yes);
        register(db, "effects", start).await;
        assert_eq!(behind().await, expected, "{start:?}");
    }
    assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::Yes);
    assert!(count(db, "position").await >= places, "there may be millions: none is deleted one by one");
    maintain::round(db, Keep::default(), Utc::now() + chrono::Duration::days(30), maintain::PATIENCE).await.unwrap();
    assert_eq!(count(db, "position").await, 0);
}
