//! Processes that start and stop while a route publishes: a shard changes its worker between two batches, so nothing is
//! published twice.

use lapin::ExchangeKind;
use pillarbox::log::{Post, Source, post_all};
use server::migrations;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, distinct, first_copies, numbered, one_route, relayed};

const KEYS: usize = 40;

/// Posts the numbers of each key, a few at a time.
async fn post_numbers(database: &TestDatabase, numbers: std::ops::Range<usize>) {
    for number in numbers {
        let messages: Vec<Post> =
            (0..KEYS).map(|key| numbered("test.posted", Some(&format!("key{key}")), number)).collect();
        let mut tx = database.pool().begin().await.unwrap();
        post_all(&mut tx, &Source::new("sql"), &messages).await.unwrap();
        tx.commit().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_join_and_end_while_a_route_publishes_repeat_no_message() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("test.exchange", ExchangeKind::Topic).await;
    amqp.queue("all", "test.exchange", "test.#").await;
    let start = || {
        TestApp::start_with(&database, |settings| {
            one_route(&vhost)(settings);
            (settings.relay.workers, settings.relay.batch_size) = (6, 10);
            // A process that stands still for longer than its lease publishes again, which is not the claim of this test.
            // Shards are distributed every two seconds.
            settings.lease_ms = 10_000;
        })
    };
    let (first, second) = tokio::join!(start(), start());
    let (third, ()) = tokio::join!(start(), post_numbers(&database, 0..60));
    eventually("all messages are published", TIMEOUT, async || relayed(database.pool(), "relay.test").await).await;
    tokio::join!(first.stop(), post_numbers(&database, 60..100));
    eventually("all messages are published", TIMEOUT, async || relayed(database.pool(), "relay.test").await).await;
    tokio::join!(second.stop(), third.stop());

    let received = amqp.consume("all", amqp.depth("all").await as usize).await;
    assert_eq!((distinct(&received), received.len()), (KEYS * 100, KEYS * 100), "repeated messages");
    for (key, numbers) in first_copies(&received) {
        assert_eq!(numbers, (0..100).collect::<Vec<_>>(), "{key}");
    }
}
