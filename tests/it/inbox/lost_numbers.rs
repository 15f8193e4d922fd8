//! Streams where numbers are not what they were: assigned again after a failover, or deleted; and a database that hangs.

use std::time::Duration;

use serde_json::json;
use server::migrations;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase};
use uuid::Uuid;

use super::stream_client::{Event, StreamClient};
use crate::delivery::fixture::insert_in_app;
use crate::support::DEADLINE;

async fn insert(db: &PgPool, user: Uuid, title: &str) {
    let mut tx = db.begin().await.unwrap();
    insert_in_app(&mut tx, user, "join.promoted", json!({"title": title})).await;
    tx.commit().await.unwrap();
}

async fn next(stream: &mut StreamClient) -> Event {
    tokio::time::timeout(DEADLINE, stream.next()).await.expect("an event arrives").expect("the stream is open")
}

/// Loses the notifications from this number on, as a failover to a standby that lagged does.
async fn lose(db: &PgPool, from: i64) {
    let mut tx = db.begin().await.unwrap();
    let delete = "delete from pillarbox_notify.notification where seq >= $1";
    sqlx::query(delete).bind(from).execute(&mut *tx).await.unwrap();
    let reset = "update pillarbox_notify.inbox set last_seq = $1 - 1";
    sqlx::query(reset).bind(from).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn a_client_misses_nothing_when_numbers_are_assigned_again_or_were_deleted() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    let user = Uuid::now_v7();
    let client = app.user(user, None);
    for number in 1..=5 {
        insert(db, user, &format!("before {number}")).await;
    }
    let mut stream = StreamClient::connect(&client, "?after=0", None).await;
    let mut positions = Vec::new();
    for _ in 1..=5 {
        positions.push(next(&mut stream).await.position);
    }
    stream.cut();

    // Its numbers exist again, for other notifications, when the client connects.
    lose(db, 4).await;
    for number in 4..=6 {
        insert(db, user, &format!("after {number}")).await;
    }
    let mut stream = StreamClient::connect(&client, "", Some(&positions[4])).await;
    for seq in 4..=6 {
        let event = next(&mut stream).await;
        assert_eq!((event.id, event.data["title"].as_str().unwrap().contains("after")), (seq, true), "{event:?}");
        positions.push(event.position);
    }
    stream.cut();
    // Not all of them exist yet.
    lose(db, 5).await;
    insert(db, user, "new 5").await;
    let mut stream = StreamClient::connect(&client, "", positions.last().map(String::as_str)).await;
    insert(db, user, "new 6").await;
    for seq in [5, 6] {
        let event = next(&mut stream).await;
        assert_eq!((event.id, event.data["title"].as_str().unwrap().contains("new")), (seq, true), "{event:?}");
    }

    // Retention has deleted what the client has got last, and more.
    let delete = "delete from pillarbox_notify.notification where seq between 2 and 4";
    sqlx::query(delete).execute(db).await.unwrap();
    let mut with_time = StreamClient::connect(&client, "", Some(&positions[2])).await;
    let mut number_only = StreamClient::connect(&client, "", Some("3")).await;
    for stream in [&mut with_time, &mut number_only] {
        assert_eq!((next(stream).await.id, next(stream).await.id), (5, 6));
    }
    app.stop().await;
}

#[tokio::test]
async fn a_stream_ends_when_the_database_does_not_answer_and_continues_later() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start_with(&database, |settings| settings.statement_timeout_ms = 120_000).await;
    let user = Uuid::now_v7();
    let client = app.user(user, None);
    let mut stream = StreamClient::connect(&client, "", None).await;
    let mut blocked = db.begin().await.unwrap();
    let lock = "lock table pillarbox_notify.contact in access exclusive mode";
    sqlx::query(lock).execute(&mut *blocked).await.unwrap();
    insert(db, user, "Rust meetup").await;
    let ended = tokio::time::timeout(DEADLINE - Duration::from_secs(5), stream.next()).await;
    assert!(matches!(ended, Ok(None)), "{ended:?}");
    blocked.rollback().await.unwrap();
    let mut stream = StreamClient::connect(&client, "?after=0", None).await;
    assert_eq!(next(&mut stream).await.id, 1);
    app.stop().await;
}
