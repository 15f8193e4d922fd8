//! Streams of the inbox: nothing is missing and nothing is repeated, across reconnects and processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use rand::Rng;
use serde_json::json;
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, TestApp, TestDatabase};
use uuid::Uuid;

use super::stream_client::StreamClient;
use crate::delivery::fixture::insert_in_app;
use crate::hub::fixture::test_size;
use crate::support::{DEADLINE, text};

const WRITERS: usize = 6;

/// Inserts notifications of two users in transactions that take some time, and some of which are rolled back, until `stop`.
async fn write(db: &PgPool, mut users: [Uuid; 2], stop: &AtomicBool) {
    users.sort();
    while !stop.load(Ordering::Relaxed) {
        let mut tx = db.begin().await.unwrap();
        let pause = Duration::from_millis(rand::rng().random_range(0..15));
        for user in users {
            insert_in_app(&mut tx, user, "order.paid", json!({})).await;
        }
        tokio::time::sleep(pause).await;
        match rand::rng().random_ratio(1, 5) {
            true => tx.rollback().await.unwrap(),
            false => tx.commit().await.unwrap(),
        }
    }
}

/// What a client has got.
#[derive(Default)]
struct Seen {
    ids: Vec<i64>,
    position: Option<String>,
}

impl Seen {
    /// Continues the stream, and reads until the notification `last`, or until the connection is cut after `life`.
    async fn read(&mut self, client: &Client, life: Duration, last: Option<i64>) {
        let mut stream = match &self.position {
            Some(position) => StreamClient::connect(client, "", Some(position)).await,
            None => StreamClient::connect(client, "?after=0", None).await,
        };
        let reading = async {
            while last.is_none() || self.ids.last().copied() < last {
                let Some(event) = stream.next().await else { break };
                assert_eq!(event.data["seq"], event.id);
                self.ids.push(event.id);
                self.position = Some(event.position);
            }
        };
        let _ = tokio::time::timeout(life, reading).await;
        stream.cut();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_cut_fifty_times_sees_each_notification_once_and_in_order() {
    let database = TestDatabase::new(&migrations()).await;
    let apps = [TestApp::start(&database).await, TestApp::start(&database).await];
    let (user, other) = (Uuid::now_v7(), Uuid::now_v7());
    let clients: Vec<Client> = apps.iter().map(|app| app.user(user, None)).collect();
    let (mut seen, stop) = (Seen::default(), AtomicBool::new(false));
    let reading = async {
        for cut in 0..test_size(50, 500) {
            let life = Duration::from_millis(rand::rng().random_range(0..60));
            seen.read(&clients[cut % clients.len()], life, None).await;
        }
        stop.store(true, Ordering::Relaxed);
    };
    let writing = join_all((0..WRITERS).map(|_| write(database.pool(), [user, other], &stop)));
    tokio::join!(reading, writing);
    let last = "select last_seq from pillarbox_notify.inbox where user_id = $1";
    let last: i64 = sqlx::query_scalar(last).bind(user).fetch_one(database.pool()).await.unwrap();
    seen.read(&clients[0], DEADLINE, Some(last)).await;
    assert_eq!(seen.ids, (1..=last).collect::<Vec<_>>());
    let [first, second] = apps;
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_stream_begins_now_or_where_the_client_says_and_crosses_processes() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let apps = [TestApp::start(&database).await, TestApp::start(&database).await];
    let user = Uuid::now_v7();
    let clients: Vec<Client> = apps.iter().map(|app| app.user(user, None)).collect();
    let insert = async || {
        let mut tx = db.begin().await.unwrap();
        let seq = insert_in_app(&mut tx, user, "join.promoted", json!({"title": "Rust meetup"})).await;
        tx.commit().await.unwrap();
        seq
    };
    for _ in 0..150 {
        insert().await;
    }
    let mut now = StreamClient::connect(&clients[0], "", None).await;
    let mut all = StreamClient::connect(&clients[1], "?after=0", None).await;
    let mut some = StreamClient::connect(&clients[1], "?after=7", Some("148")).await;
    // A number that does not exist yet does not hide what comes.
    let mut beyond = StreamClient::connect(&clients[0], "", Some("10000")).await;
    let stranger = apps[0].user(Uuid::now_v7(), None);
    let mut stranger = StreamClient::connect(&stranger, "?after=0", None).await;
    insert().await;
    let next = async |stream: &mut StreamClient| {
        tokio::time::timeout(DEADLINE, stream.next()).await.expect("an event arrives").expect("the stream is open")
    };
    let event = next(&mut now).await;
    assert_eq!((event.id, text(&event.data["title"])), (151, "A seat is free, and it is yours: event “Rust meetup”"));
    assert_eq!(next(&mut beyond).await.id, 151);
    for id in [149, 150, 151] {
        assert_eq!(next(&mut some).await.id, id);
    }
    for id in 1..=151 {
        assert_eq!(next(&mut all).await.id, id);
    }
    assert_eq!(insert().await, 152);
    for stream in [&mut now, &mut all, &mut some, &mut beyond] {
        assert_eq!(next(stream).await.id, 152);
    }
    let silence = tokio::time::timeout(Duration::from_millis(100), stranger.next()).await;
    assert!(silence.is_err(), "others get nothing: {silence:?}");
    clients[0].get("/notify/v1/inbox/events?after=-1").await.assert_problem(400, "malformed-query");
    for invalid in ["x", "1-", "-5"] {
        let invalid = clients[0].with_header("last-event-id", invalid);
        invalid.get("/notify/v1/inbox/events").await.assert_problem(400, "malformed-header");
    }
    let [first, second] = apps;
    first.stop().await;
    second.stop().await;
}
