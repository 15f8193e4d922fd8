//! Streams and processes: pulls that wait are woken, and a server that is killed loses nothing.

use std::time::{Duration, Instant};

use serde_json::json;
use server::migrations;
use server::settings::Role;
use sqlx::PgPool;
use testkit::{Client, TestApp, TestDatabase, eventually};
use tokio::task::JoinHandle;

use crate::hub::fixture::{Fixture, numbered_events, post, post_batch, test_size};
use crate::hub::process::Replica;
use crate::hub::stream_fixture::{SharedSeen, acknowledge, create_stream, items, pull, read_on};
use crate::support::DEADLINE;

/// A pull that waits longer than this was not woken: it renews its lease after 10 s, and reads again.
const WOKEN_WITHIN: Duration = Duration::from_secs(8);

/// Posts an event while a pull waits, and returns how long after the post the pull has returned it.
async fn time_to_return(db: &PgPool, reader: &Client, producer: &Client) -> Duration {
    let lease = async || {
        let lease = "select extract(epoch from max(lease_until))::float8 from pillarbox_hub.stream_reader";
        sqlx::query_scalar::<_, Option<f64>>(lease).fetch_one(db).await.unwrap()
    };
    let lease_before = lease().await;
    let waiting = tokio::spawn({
        let reader = reader.clone();
        async move {
            let pulled = pull(&reader, json!({"reader": "a", "wait_ms": 20_000})).await;
            (pulled, Instant::now())
        }
    });
    // The pull renews its lease when it finds nothing, before it waits.
    eventually("the pull has found nothing", DEADLINE, async || lease().await > lease_before).await;
    assert!(!waiting.is_finished(), "it waits");
    let posted_at = Instant::now();
    post(producer, "order.paid", json!({"n": 1}), Some("key")).await;
    let (pulled, returned_at) = waiting.await.unwrap();
    assert_eq!(items(&pulled).len(), 1);
    acknowledge(reader, "a", &pulled).await;
    returned_at - posted_at
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_waits_returns_at_once_when_an_event_is_posted() {
    let Fixture { database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    let same_process = time_to_return(database.pool(), &manager, &manager).await;
    assert!(same_process < WOKEN_WITHIN, "{same_process:?}");
    // Another process reads, and has no fan-out.
    let reading = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api]).await;
    let reader = reading.anonymous().bearer(manager.credential());
    let other_process = time_to_return(database.pool(), &reader, &manager).await;
    assert!(other_process < WOKEN_WITHIN, "{other_process:?}");
    // A pull that waits uses no connection, and does not delay a stop.
    let waiting = tokio::spawn({
        let reader = reader.clone();
        async move { pull(&reader, json!({"reader": "a", "wait_ms": 20_000})).await }
    });
    // Other parts of the server have short transactions of their own; a pull that held one would hold it until it returns.
    let busy = "select count(*) from pg_stat_activity
                where datname = current_database() and state like 'idle in transaction%'";
    eventually("no connection is in a transaction", DEADLINE, async || {
        sqlx::query_scalar::<_, i64>(busy).fetch_one(database.pool()).await.unwrap() == 0
    })
    .await;
    assert!(!waiting.is_finished(), "it waits");
    let stopped_at = Instant::now();
    reading.stop().await;
    assert!(stopped_at.elapsed() < Duration::from_secs(5), "{:?}", stopped_at.elapsed());
    assert_eq!(items(&waiting.await.unwrap()).len(), 0);
    app.stop().await;
}

/// Many, so that a server that is killed is about to answer some of them.
const READERS: usize = 8;

fn start_readers(clients: &[Client], seen: &SharedSeen) -> Vec<JoinHandle<()>> {
    let start = |n: usize| tokio::spawn(read_on(clients.to_vec(), format!("reader-{n}"), seen.clone()));
    (0..READERS).map(start).collect()
}

async fn end_readers(readers: Vec<JoinHandle<()>>) {
    for reader in readers {
        reader.abort();
        assert!(reader.await.unwrap_err().is_cancelled(), "a reader failed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_during_pulls_loses_nothing() {
    const LANES: usize = 12;
    let (messages, kills) = (test_size(30, 300), test_size(3, 30));
    let database = TestDatabase::new(&migrations()).await;
    let mut replicas = vec![Replica::start(&database.url()), Replica::start(&database.url())];
    // Not one of those that are killed.
    let api = Replica::start_as(&database.url(), "api");
    let manager = api.admin().await;
    create_stream(&manager, json!({})).await;
    let seen = SharedSeen::default();
    let producer = tokio::spawn({
        let manager = manager.clone();
        async move {
            for n in 1..=messages {
                post_batch(&manager, numbered_events(LANES, [n])).await;
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
        }
    });
    for kill in 0..kills {
        let mut clients = Vec::new();
        for replica in &replicas {
            clients.push(replica.admin().await);
        }
        let readers = start_readers(&clients, &seen);
        let read_before = seen.lock().unwrap().count();
        eventually("the readers read", DEADLINE, async || seen.lock().unwrap().count() > read_before).await;
        replicas[kill % 2].process.kill9();
        replicas[kill % 2] = Replica::start(&database.url());
        end_readers(readers).await;
    }
    producer.await.unwrap();
    let readers = start_readers(std::slice::from_ref(&manager), &seen);
    eventually("everything is read", DEADLINE, async || seen.lock().unwrap().count() == LANES * messages).await;
    end_readers(readers).await;
    seen.lock().unwrap().assert_complete(LANES, messages as u64);
}
